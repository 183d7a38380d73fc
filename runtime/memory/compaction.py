"""Compaction: the choice of tensors to move so that scattered gaps become one that is large enough.

A move is a copy within the device, about a hundred times faster than one over the link. Memory left unused to avoid
moves would cost such transfers in every iteration.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

LEAST_CUT_BYTES = 1 << 20  # a larger remainder of a large piece is cut off; a smaller one belongs to the piece
_PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
_CANDIDATES = 400  # most runs whose tensors are tested for room elsewhere, the cheapest first


class Extent(NamedTuple):
    """The piece of a tensor, whether the tensor may move, and the bytes that it takes elsewhere.

    A piece can be longer than its tensor, by a remainder too small to be cut off.
    """

    start: int
    end: int
    movable: bool
    bytes: int


class Stretch(NamedTuple):
    """A stretch of memory that becomes one gap when its extents, the largest first, have moved out."""

    start: int
    end: int
    extents: tuple[Extent, ...]


def gaps_between(extents: Sequence[Extent], start: int, end: int) -> list[tuple[int, int]]:
    """Return the start and end of every gap between extents, which are in order.

    Returns: those gaps that an allocator would use.
    """
    edges = [start, *(edge for extent in extents for edge in extent[:2]), end]
    pairs = zip(edges[::2], edges[1::2])
    return [(low, high) for low, high in pairs if high - low > LEAST_CUT_BYTES]


def first_without_place(lengths: Sequence[int], sizes: Sequence[int]) -> int | None:
    """Return the first of `sizes` that fits no gap, if each takes the best fit.

    Parameters
    ----------
    lengths: lengths of the gaps, ascending. sizes: bytes to be allocated together, descending.
    """
    if not sizes or (lengths and lengths[-1] >= sum(sizes)):
        return None
    left = list(lengths)
    for size in sizes:
        at = bisect.bisect_left(left, size)
        if at == len(left):
            return size
        rest = left.pop(at) - size
        if rest > LEAST_CUT_BYTES:
            bisect.insort(left, rest)
    return None


def cheapest_run(extents: Sequence[Extent], start: int, end: int, size: int) -> Stretch | None:
    """Return the run of at least `size` bytes with the least to move, all of which fits into gaps outside the run.

    If there is no such run, return one that makes a gap larger than any existing one, from which a later call
    continues.

    Parameters
    ----------
    extents: extents in order, between `start` and `end`. size: a size larger than every gap.
    """
    gaps = gaps_between(extents, start, end)
    largest = max((high - low for low, high in gaps), default=0)
    for part in _PARTS:
        target = largest + max(1, int((size - largest) * part))
        for candidate in sorted(_candidates(extents, start, end, target))[:_CANDIDATES]:
            _, low, high, first, after = candidate
            lengths = sorted(b - a for a, b in gaps if b <= low or a >= high)
            inside = _largest_first(extents[first:after])
            if first_without_place(lengths, [one.bytes for one in inside]) is None:
                return Stretch(low, high, tuple(inside))
    return None


def run_to_pack(extents: Sequence[Extent], start: int, end: int, size: int) -> Stretch | None:
    """Return the run with the least bytes in which `size` bytes are free once its tensors lie side by side.

    Gaps, and what pieces hold beyond their tensors, count together. Such a run can need memory elsewhere for its
    tensors while they are laid out anew.
    """
    found = []
    first, low = 0, start
    for i, extent in enumerate([*extents, Extent(end, end, False, 0)]):
        if not extent.movable:
            found += _packable(extents, first, i, low, extent.start, size)
            first, low = i + 1, extent.end
    if not found:
        return None
    _, low, high, first, after = min(found)
    return Stretch(low, high, tuple(_largest_first(extents[first:after])))


def _packable(extents: Sequence[Extent], first: int, last: int, start: int, end: int, size: int) -> list[_Candidate]:
    """List the shortest such runs among the extents from `first` to before `last`, all of which can move."""
    found, after, taken = [], first, 0
    for i in range(first, last):
        low = extents[i - 1].end if i > first else start
        while after < last and (after <= i or extents[after].start - low - taken < size):
            taken += extents[after].bytes
            after += 1
        high = extents[after].start if after < last else end
        if high - low - taken < size:
            break
        found.append(_Candidate(taken, low, high, i, after))
        taken -= extents[i].bytes
    return found


def _largest_first(extents: Iterable[Extent]) -> list[Extent]:
    return sorted(extents, key=lambda one: (-one.bytes, one.start))


class _Candidate(NamedTuple):
    """A run: its bytes to move, its start and end, and its extents, from `first` to before `after`."""

    moved_bytes: int
    start: int
    end: int
    first: int
    after: int


def _candidates(extents: Sequence[Extent], start: int, end: int, size: int) -> Iterator[_Candidate]:
    """Yield every shortest run of at least `size` bytes between extents that cannot move."""
    first, low = 0, start
    for i, extent in enumerate([*extents, Extent(end, end, False, 0)]):
        if not extent.movable:
            if extent.start - low >= size:
                yield from _between(extents, first, i, low, extent.start, size)
            first, low = i + 1, extent.end


def _between(extents: Sequence[Extent], first: int, last: int, start: int, end: int, size: int) -> Iterator[_Candidate]:
    """Yield the runs among the extents from `first` to before `last`, all of which can move."""
    after, moved = first, 0
    for i in range(first, last):
        low = extents[i - 1].end if i > first else start
        while after < last and (after <= i or extents[after].start - low < size):
            moved += extents[after].bytes
            after += 1
        high = extents[after].start if after < last else end
        if high - low < size:
            return
        yield _Candidate(moved, low, high, i, after)
        moved -= extents[i].bytes
