"""Float32 copies of parameters in RAM, as the solver sees them: a tier that parameters come from by a cast."""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.devices.ring import BUFFERS_BYTES
from ..runtime.replay.cast import buffers_bytes
from ..solver.resources import CAST_BYTES, Path, Tier
from ..solver.rows import Group

FLOAT32_COPIES = "float32 copies"


def tier_of(groups: Sequence[Group], on_host: bool) -> Tier | None:
    """Return the tier; None if no parameter has a copy, or if it is not known how fast the host works.

    A cast reads and writes memory as an update does, and computes less. So it moves at least as many bytes per second.

    Parameters
    ----------
    on_host: whether the device's memory is the host's, so that casts go straight to it.
    """
    seconds = sum(group.cpu_update_s for group in groups if group.has_copies)
    if not seconds:
        return None
    rate = sum(group.host_update_bytes for group in groups if group.has_copies) / seconds / CAST_BYTES
    largest = max(tensor.param_bytes for group in groups if group.has_copies for tensor in group.tensors)
    on_the_way = buffers_bytes(largest) + (0 if on_host else BUFFERS_BYTES)
    path = Path(FLOAT32_COPIES, rate, rate, 2 * rate, through_host=True)
    return Tier(path, 0, buffers_bytes=on_the_way, casts=True)
