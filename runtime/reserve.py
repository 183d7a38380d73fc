"""What a caching allocator reserves for a schedule, found out on the allocator itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from .pools import SMALL_SEGMENT_BYTES, most_reserved_bytes, pool_peaks
from .rehearsal import Rehearsal

# Left for the user's own tensors (batches, losses, metrics), which come and go as they like.
_SLACK_SEGMENTS, _SLACK_SHARE = 1, 256
# By which the segment is larger than it must be, since a kernel may ask for its memory in another order than rehearsed:
# this part of it at least, and more where there is room.
_LEAST_PAD_SHARE, _PAD_SHARE, _PAD_BYTES = 64, 16, 24 << 20
_SEGMENT_PERCENT = (100, 102, 105, 110, 115, 120, 130, 150)  # of the large allocations' peak: the sizes tried
_TINY_BYTES = 512  # of the smallest piece that an allocator hands out
# Rehearsed, unless one ends as an earlier one did; in at least so many all has to find place.
_ITERATIONS, _LEAST_ITERATIONS = 32, 8
_POCKETS = 64  # for numbers of the user's: losses and metrics


@dataclass(frozen=True)
class Place:
    """Where an iteration's memory comes from.

    Parameters
    ----------
    segment_bytes: what the allocator reserves in one piece. iterations: after so many, what stays on the device in
        between has to be laid out anew, since it may have moved to where no rehearsal has seen it; None if it stays.
    """

    segment_bytes: int
    iterations: int | None

    def take(self, device: torch.device) -> None:
        """Have the allocator reserve the segment, and nothing else that it need not, before an iteration starts.

        Where tensors of the user's lie in an earlier segment and both would not fit, that one has to do.
        """
        torch.accelerator.empty_cache()
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(self.segment_bytes, dtype=torch.uint8, device=device)  # let go at once, and kept


@dataclass(frozen=True)
class Reserved:
    """What the allocator will hold.

    Parameters
    ----------
    bytes: in all, what is left for the user's included. needed_bytes: of these, what it cannot do without.
    place: what has to be done for this before and during training.
    """

    bytes: int
    needed_bytes: int
    place: Place


@dataclass(frozen=True)
class Shortfall:
    """Bytes by which the budget is too small even without gaps; 0 if only gaps are in the way."""

    bytes: int


def reserve(device: torch.device, starts: tuple[Rehearsal, ...], budget_bytes: int) -> Reserved | Shortfall:
    """How the allocator can hold what an iteration takes, most of it in one piece.

    One large segment, from which the allocator cuts and into which it merges, leaves less unused than many small ones.
    Nothing of the iteration may be on the device. `Place.take` has to come before training.

    Parameters
    ----------
    starts: every way in which training may start, rehearsed.
    budget_bytes: what may be reserved, library workspaces included.

    Returns: what will be reserved, or what is missing for the iteration to fit.
    """
    _make_workspaces(device)
    try:
        return _reserve(device, starts, budget_bytes)
    finally:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def _reserve(device: torch.device, starts: tuple[Rehearsal, ...], budget_bytes: int) -> Reserved | Shortfall:
    large, small = _peaks(starts)
    torch.accelerator.empty_cache()
    limit = budget_bytes - _slack_bytes(budget_bytes)
    whole = limit - torch.accelerator.memory_reserved(device) - small
    # Small allocations may find place in segments that are there already.
    for segment in sorted({*_segments(large, whole), *_segments(large, whole + SMALL_SEGMENT_BYTES)}):
        tight = _play(device, starts, segment, limit)
        if tight is None:
            continue
        # What is left is divided as what is used: small allocations find what the segment does not take.
        room, least = limit - tight.bytes, _least_pad_bytes(segment)
        pad = _in_segments(min(room * large // (large + small), segment // _PAD_SHARE + _PAD_BYTES)) if large else 0
        for more in sorted({max(pad, least), max(_in_segments(pad // 2), least), least}, reverse=True):
            played = _play(device, starts, segment + more, limit)
            if played is not None:
                slack = _slack_bytes(budget_bytes)
                spare = slack + _in_segments(min(limit - played.bytes, small // _PAD_SHARE))
                needed = min(tight.bytes + least, played.bytes) + slack
                return Reserved(played.bytes + spare, needed, Place(segment + more, played.iterations))
    return Shortfall(max(0, large + _least_pad_bytes(large) - whole))


def least_budget_bytes(device: torch.device, starts: tuple[Rehearsal, ...], iterations: int = _LEAST_ITERATIONS) -> int:
    """About the least budget in which `reserve` finds place for these rehearsals, by the allocator's rules.

    Parameters
    ----------
    iterations: played of each; few are a first estimate.
    """
    large, _ = _peaks(starts)
    torch.accelerator.empty_cache()
    needed = torch.accelerator.memory_reserved(device) + min(
        max(_model_bytes(start, segment, iterations) for start in starts)
        for segment in _segments(large, 2 * large + SMALL_SEGMENT_BYTES)
    )
    # One segment more, since what else is on the device need not lie as it does now.
    free = needed + (_SLACK_SEGMENTS + 1) * SMALL_SEGMENT_BYTES
    return -(-free * _SLACK_SHARE // (_SLACK_SHARE - 1)) + 1


def _model_bytes(start: Rehearsal, segment: int, iterations: int) -> int:
    sizes = {segment, segment + _least_pad_bytes(segment)}
    return max(most_reserved_bytes(start.played(iterations), size) for size in sizes)


def make_pockets(device: torch.device, tiny: int, others_bytes: Iterable[int]) -> tuple[torch.Tensor, ...]:
    """Cut small memory into pieces in which what is not rehearsed finds place without cutting up what is.

    An allocator takes the smallest piece that is large enough: numbers, which come and go at any time, go into these.

    Parameters
    ----------
    tiny: how many numbers optimizer and gate keep on the device. others_bytes: tensors that the user brings there.

    Returns: what keeps the pieces apart; let go of, they are one again.
    """
    others = [size for size in others_bytes if _TINY_BYTES < size <= SMALL_SEGMENT_BYTES // 8]
    pieces, walls = [], []
    for size in [*[_TINY_BYTES] * (tiny + _POCKETS), *others, *others]:
        pieces.append(torch.empty(size, dtype=torch.uint8, device=device))
        walls.append(torch.empty(1, dtype=torch.uint8, device=device))
    return tuple(walls)


def _segments(large: int, whole: int) -> list[int]:
    """Sizes to try for the segment, the smallest first; none if what is free does not hold the large allocations."""
    tried = {min(_in_segments(large * percent // 100 + SMALL_SEGMENT_BYTES - 1), whole) for percent in _SEGMENT_PERCENT}
    return sorted(rounded for rounded in {_in_segments(size) for size in tried} if rounded >= large)


def _in_segments(size: int) -> int:
    """Rounded down to whole multiples of the least that is reserved at once."""
    return size - size % SMALL_SEGMENT_BYTES


def _least_pad_bytes(segment: int) -> int:
    return _in_segments(segment // _LEAST_PAD_SHARE)


def _slack_bytes(budget_bytes: int) -> int:
    return _SLACK_SEGMENTS * SMALL_SEGMENT_BYTES + budget_bytes // _SLACK_SHARE


def _peaks(starts: tuple[Rehearsal, ...]) -> tuple[int, int]:
    large, small = (max(peaks) for peaks in zip(*(pool_peaks(chain(*start.stretches)) for start in starts)))
    return large, small


def _make_workspaces(device: torch.device) -> None:
    """Let matrix libraries take what they hold for good: once for this thread, and once for autograd's."""
    with torch.enable_grad():
        a, b = (torch.ones(16, 16, device=device, requires_grad=True) for _ in range(2))
        torch.nn.functional.linear(a, b, torch.ones(16, device=device)).matmul(b).sum().backward()


class _Played(NamedTuple):
    """The most bytes that were reserved, and in how many iterations; None in as many as there may be."""

    bytes: int
    iterations: int | None


def _play(device: torch.device, starts: tuple[Rehearsal, ...], segment_bytes: int, limit_bytes: int) -> _Played | None:
    """The most that any start reserves with a segment of this size; None if it is soon more than the limit."""
    played = []
    for start in starts:
        one = _play_one(device, start, segment_bytes, limit_bytes)
        if one is None:
            return None
        played.append(one)
    lasting = [one.iterations for one in played if one.iterations is not None]
    return _Played(max(one.bytes for one in played), min(lasting, default=None))


def _play_one(device: torch.device, start: Rehearsal, segment_bytes: int, limit_bytes: int) -> _Played | None:
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    retries, most = _retries(device), 0
    live: dict[int, torch.Tensor] = {}
    layouts: set[tuple[int, ...]] = set()
    try:
        torch.empty(segment_bytes, dtype=torch.uint8, device=device)
        for stretch in start.played(_ITERATIONS):
            for change in stretch:
                if change.bytes:
                    live[change.number] = torch.empty(change.bytes, dtype=torch.uint8, device=device)
                else:
                    del live[change.number]
            reserved = torch.accelerator.max_memory_reserved(device)
            # Whoever gives cached memory back to get on waits for the device.
            if reserved > limit_bytes or _retries(device) > retries:
                break
            most, places = reserved, [tensor.data_ptr() for tensor in live.values()]
            layout = (reserved, torch.accelerator.memory_allocated(device), *places)
            if layout in layouts:
                return _Played(most, None)
            layouts.add(layout)
    except torch.OutOfMemoryError:
        pass
    iterations = len(layouts) - 1
    return _Played(most, iterations) if iterations >= _LEAST_ITERATIONS else None


def _retries(device: torch.device) -> int:
    return int(torch.accelerator.memory_stats(device).get("num_alloc_retries", 0))
