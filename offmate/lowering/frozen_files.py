"""Frozen parameters that a plan may read from files, as the solver sees them."""

from __future__ import annotations

from dataclasses import dataclass

from ..solver.resources import Path, Tier

STORAGE = "storage"


@dataclass(frozen=True)
class FrozenFiles:
    """Frozen parameters in files that are only read, such as a checkpoint's.

    Parameters
    ----------
    names: of the parameters. read_bytes_per_s: at which the files are read.
    buffers_bytes: RAM that their copies to the device pass.
    """

    names: frozenset[str]
    read_bytes_per_s: float
    buffers_bytes: int

    @property
    def tier(self) -> Tier:
        """The tier that holds them. Nothing leaves to it, so it has no capacity."""
        rate = self.read_bytes_per_s
        path = Path(STORAGE, rate, rate, rate, through_host=True)
        return Tier(path, 0, holds_frozen=True, buffers_bytes=self.buffers_bytes)
