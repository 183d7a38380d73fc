"""The memory that a caching allocator reserves for a schedule, by its rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch

from .changes import Rehearsal
from .pools import SMALL_SEGMENT_BYTES, Played, played, pool_peaks
from .updated import Updated

# Left for the user's own tensors (batches, losses, metrics), which come and go at any time.
_SLACK_SEGMENTS, _SLACK_SHARE = 1, 256
# The segment in percent of the large allocations' peak: sizes to try, the largest first, since more room means fewer
# moves; and sizes of which a budget must allow at least one.
_SEGMENT_PERCENT, _NEEDED_PERCENT = (115, 110, 107, 105, 104, 103), (103, 104, 106, 110, 120)
_SMALL_SHARE = 32  # part (1/32) of the small allocations' peak, left for their fragmentation
_TINY_BYTES = 512  # smallest piece that an allocator hands out
_ITERATIONS = 8  # iterations rehearsed
_POCKETS = 64  # holes for the user's scalars: losses and metrics


@dataclass(frozen=True)
class MemoryLayout:
    """The layout of an iteration's memory.

    Parameters
    ----------
    segment_bytes: bytes that the allocator reserves in one piece for large tensors. reserved_bytes: all reserved bytes;
        if the allocator comes to hold more, the small pool is fragmented and has to be laid out anew. moved_bytes:
        approximate bytes that move within the segment per iteration. limit_bytes: the most that an iteration may have
        the allocator reserve. updated: the optimizer's memory for each parameter updated on the device.
    """

    segment_bytes: int
    reserved_bytes: int
    moved_bytes: int
    limit_bytes: int
    updated: Mapping[str, Updated] = field(default_factory=dict)


@dataclass(frozen=True)
class Reserved:
    """The bytes that the allocator will hold.

    Parameters
    ----------
    bytes: all of them, including those left for the user's tensors. needed_bytes: the least of them that suffice.
    place: the layout that achieves this, to be set up before training and kept during it.
    """

    bytes: int
    needed_bytes: int
    place: MemoryLayout


@dataclass(frozen=True)
class Shortfall:
    """The least budget, approximately, that would be large enough."""

    needed_bytes: int


def reserve(device: torch.device, starts: tuple[Rehearsal, ...], budget_bytes: int) -> Reserved | Shortfall:
    """Plan how the allocator can hold the memory of an iteration, most of it in one piece (see arena.py).

    No tensor of the iteration may be on the device. The arena has to take its segment before training.

    Parameters
    ----------
    starts: rehearsals, one for each way in which training may start.
    budget_bytes: most bytes that may be reserved, including library workspaces.

    Returns: the bytes that will be reserved, or the budget that the iteration would need.
    """
    _make_workspaces(device)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    held = torch.accelerator.memory_reserved(device)
    large, small = _peaks(starts)
    drift = small // _SMALL_SHARE
    limit = budget_bytes - _slack_bytes(budget_bytes) - held - drift
    for segment in _segments(large, limit - small):
        found = _played(starts, segment)
        if found.reserved_bytes <= limit:
            most = held + found.reserved_bytes + drift
            reserved = most + _slack_bytes(budget_bytes)
            needed = min(reserved, _needed_bytes(held, starts))
            return Reserved(reserved, needed, MemoryLayout(segment, most, found.moved_bytes, limit + drift))
    return Shortfall(max(_needed_bytes(held, starts), budget_bytes + 1))


def serves(place: MemoryLayout, starts: tuple[Rehearsal, ...]) -> bool:
    """Return whether another iteration, such as one with smaller batches, can be held in a layout.

    Its tensors are smaller, but more of them may come from the pool of small ones, of which the layout has only so
    many.
    """
    drift = _peaks(starts)[1] // _SMALL_SHARE
    return _played(starts, place.segment_bytes).reserved_bytes + drift <= place.limit_bytes


def _needed_bytes(held: int, starts: tuple[Rehearsal, ...]) -> int:
    """Return the least budget in which everything fits, by the allocator's rules.

    Parameters
    ----------
    held: bytes that the allocator has reserved already.
    """
    large, small = _peaks(starts)
    least = None
    for percent in _NEEDED_PERCENT:
        segment = _in_segments(large * percent // 100) + 2 * SMALL_SEGMENT_BYTES
        if least is not None and segment + least.small_bytes >= least.reserved_bytes:
            break  # small allocations never come from the segment, so a larger one reserves more
        found = _played(starts, segment)
        least = min(least or found, found)
    assert least is not None
    # One segment more, since other memory on the device may be laid out differently then.
    free = held + least.reserved_bytes + small // _SMALL_SHARE + (_SLACK_SEGMENTS + 1) * SMALL_SEGMENT_BYTES
    return -(-free * _SLACK_SHARE // (_SLACK_SHARE - 1)) + 1


def make_pockets(device: torch.device, tiny: int, others_bytes: Iterable[int]) -> tuple[torch.Tensor, ...]:
    """Pre-split the small pool, so that the user's own tensors fill these holes and do not fragment the plan's.

    An allocator takes the smallest piece that is large enough. So scalars, which come and go at any time, go into
    these.

    Parameters
    ----------
    tiny: number of scalars that optimizer and gate keep on the device. others_bytes: sizes of the user's tensors there.

    Returns: the tensors that keep the holes apart; once they are freed, the holes merge again.
    """
    others = [size for size in others_bytes if _TINY_BYTES < size <= SMALL_SEGMENT_BYTES // 8]
    pieces, walls = [], []
    for size in [*[_TINY_BYTES] * (tiny + _POCKETS), *others, *others]:
        pieces.append(torch.empty(size, dtype=torch.uint8, device=device))
        walls.append(torch.empty(1, dtype=torch.uint8, device=device))
    return tuple(walls)


def _segments(large: int, most: int) -> list[int]:
    """List the sizes to try for the segment, the largest first, including the piece that keeps it."""
    if not large:
        return [0]
    tried = {
        min(_in_segments(large * percent // 100) + 2 * SMALL_SEGMENT_BYTES, _in_segments(most))
        for percent in _SEGMENT_PERCENT
    }
    return sorted((size for size in tried if size >= large + SMALL_SEGMENT_BYTES), reverse=True)


def _in_segments(size: int) -> int:
    """Round down to whole multiples of the least that is reserved at once."""
    return size - size % SMALL_SEGMENT_BYTES


def _slack_bytes(budget_bytes: int) -> int:
    return _SLACK_SEGMENTS * SMALL_SEGMENT_BYTES + budget_bytes // _SLACK_SHARE


def _peaks(starts: tuple[Rehearsal, ...]) -> tuple[int, int]:
    large, small = (max(peaks) for peaks in zip(*(pool_peaks(chain(*start.stretches)) for start in starts)))
    return large, small


def _make_workspaces(device: torch.device) -> None:
    """Have matrix libraries allocate their permanent workspaces: once for this thread, and once for autograd's."""
    with torch.enable_grad():
        a, b = (torch.ones(16, 16, device=device, requires_grad=True) for _ in range(2))
        torch.nn.functional.linear(a, b, torch.ones(16, device=device)).matmul(b).sum().backward()


def _played(starts: tuple[Rehearsal, ...], segment_bytes: int) -> Played:
    """Return the most that any start reserves with a segment of this size, and the most that moves."""
    found = [played(start.played(_ITERATIONS), segment_bytes) for start in starts]
    return Played(*(max(values) for values in zip(*found)))
