"""The caching allocator's rules, as far as they decide how much it reserves.

The behaviour of the device's own allocator is what counts. This model answers what the allocator cannot: by how much
some allocations would exceed a budget. Source: c10/cuda/CUDACachingAllocator.cpp, default settings.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from .changes import Change
from .compaction import LEAST_CUT_BYTES, Extent, Stretch, cheapest_run, first_without_place

_GRAIN_BYTES = 512  # every piece is a multiple of this
_SMALL_BYTES = 1 << 20  # largest request served from small segments
SMALL_SEGMENT_BYTES = 1 << 21
_ANCHOR = -1  # number of the piece that keeps the first segment from being returned
_ROUNDS = 30  # most rounds of moves for one allocation
_LARGE_SEGMENT_BYTES, _OWN_SEGMENT_BYTES = 20 << 20, 10 << 20  # requests from the latter on get their own


class Pools:
    """Pieces of segments, with small allocations kept apart from the others.

    State: `reserved_bytes`, those of all segments; `small_bytes`, those of segments for small allocations;
    `moved_bytes`; the free pieces of each pool by size and place, with their starts and ends; the allocations' pieces
    and rounded bytes by number, and those of them that never move.

    Parameters
    ----------
    segment_bytes: size of a first large segment, in which tensors move to make room for one that does not fit.
    """

    def __init__(self, segment_bytes: int) -> None:
        self.reserved_bytes = self.small_bytes = self.moved_bytes = 0
        self._arena_end = segment_bytes
        self._fixed: set[int] = set()
        self._asked: dict[int, int] = {}
        self._next = 0
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._sizes: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._live: dict[int, tuple[int, int, bool]] = {}
        if segment_bytes:
            self._put(*self._segment(segment_bytes), False)
            self.change(Change(_ANCHOR, SMALL_SEGMENT_BYTES, fixed=True))

    def change(self, change: Change) -> None:
        """Apply a change."""
        if not change.bytes:
            self._fixed.discard(change.number)
            del self._asked[change.number]
            self._let_go(*self._live.pop(change.number))
            return
        size = self._asked[change.number] = rounded(change.bytes)
        small = size <= _SMALL_BYTES
        if self._arena_end and not (small and not change.then):
            self._make_room(large_sizes((change.bytes, *change.then)))
        self._live[change.number] = *self._cut(size, small), small
        if change.fixed:
            self._fixed.add(change.number)

    def piece(self, number: int) -> tuple[int, int]:
        """Return the start and the bytes of an allocation's piece."""
        start, length, _ = self._live[number]
        return start, length

    def _cut(self, size: int, small: bool) -> tuple[int, int]:
        """Cut a piece from a free one, or from a new segment."""
        found = self._take(size, small)
        if found is None:
            found = self._segment(_segment_bytes(size))
            self.small_bytes += found[1] if small else 0
        start, length = found
        if length - size >= _GRAIN_BYTES if small else length - size > LEAST_CUT_BYTES:
            self._put(start + size, length - size, small)
            return start, size
        return start, length

    def _make_room(self, sizes: list[int]) -> None:
        """Move tensors within the first segment until everything fits, if that is possible."""
        for _ in range(_ROUNDS):
            short = first_without_place([length for length, _ in self._free[False]], sizes)
            if short is None:
                return
            numbers = {start: n for n, (start, _, small) in self._live.items() if not small and start < self._arena_end}
            extents = [
                Extent(start, start + self._live[n][1], n not in self._fixed, self._asked[n])
                for start, n in sorted(numbers.items())
            ]
            run = cheapest_run(extents, 0, self._arena_end, short)
            if run is None:
                return
            self._clear(run, numbers)

    def _clear(self, run: Stretch, numbers: dict[int, int]) -> None:
        for length, start in [piece for piece in self._free[False] if run.start <= piece[1] < run.end]:
            self._remove(start, length, False)
        for extent in run.extents:
            number = numbers[extent.start]
            self._live[number] = *self._cut(self._asked[number], False), False
            self.moved_bytes += self._asked[number]
        self._put(run.start, run.end - run.start, False)

    def _take(self, size: int, small: bool) -> tuple[int, int] | None:
        """Remove and return the smallest free piece that is large enough (best fit)."""
        free = self._free[small]
        at = bisect.bisect_left(free, (size, 0))
        if at == len(free):
            return None
        length, start = free.pop(at)
        del self._sizes[start], self._starts[start + length]
        return start, length

    def _segment(self, length: int) -> tuple[int, int]:
        start = self._next
        self._next += length + 1  # neighbouring segments never merge
        self.reserved_bytes += length
        return start, length

    def _put(self, start: int, length: int, small: bool) -> None:
        bisect.insort(self._free[small], (length, start))
        self._sizes[start], self._starts[start + length] = length, start

    def _let_go(self, start: int, length: int, small: bool) -> None:
        after = self._sizes.get(start + length)
        if after is not None:
            self._remove(start + length, after, small)
            length += after
        before = self._starts.get(start)
        if before is not None:
            self._remove(before, start - before, small)
            start, length = before, length + start - before
        self._put(start, length, small)

    def _remove(self, start: int, length: int, small: bool) -> None:
        free = self._free[small]
        del free[bisect.bisect_left(free, (length, start))]
        del self._sizes[start], self._starts[start + length]


class Played(NamedTuple):
    """The memory of some rehearsed iterations.

    Parameters
    ----------
    reserved_bytes: of all segments, in the end. small_bytes: of those for small allocations. moved_bytes: the mean of
        all iterations.
    """

    reserved_bytes: int
    small_bytes: int
    moved_bytes: int


def played(stretches: Iterable[Iterable[Change]], segment_bytes: int) -> Played:
    """Return the memory that is reserved, nothing being returned, when these changes follow a first large segment.

    Parameters
    ----------
    stretches: the changes at the start, then those of iterations.
    """
    pools, row = Pools(segment_bytes), list(stretches)
    for change in chain(*row):
        pools.change(change)
    return Played(pools.reserved_bytes, pools.small_bytes, pools.moved_bytes // max(len(row) - 1, 1))


def pool_peaks(changes: Iterable[Change]) -> tuple[int, int]:
    """Return the most bytes held at once in large allocations, and the least bytes of segments for small ones.

    Caching allocators keep small allocations in separate segments, so that they do not fragment the large ones.
    """
    live: dict[int, int] = {}
    held, peak = [0, 0], [0, 0]
    for change in changes:
        size = rounded(change.bytes) or -live.pop(change.number)
        if change.bytes:
            live[change.number] = size
        kind = int(abs(size) <= _SMALL_BYTES)
        held[kind] += size
        peak[kind] = max(peak[kind], held[kind])
    return peak[0], _in_grains(peak[1], SMALL_SEGMENT_BYTES)


def rounded(size: int) -> int:
    """Return the bytes of the piece that a request gets."""
    return _in_grains(size, _GRAIN_BYTES)


def large_sizes(sizes: Iterable[int]) -> list[int]:
    """Return the requests that do not come from small segments, rounded and descending."""
    return sorted((rounded(size) for size in sizes if size > _SMALL_BYTES), reverse=True)


def _segment_bytes(size: int) -> int:
    if size <= _SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return _LARGE_SEGMENT_BYTES if size < _OWN_SEGMENT_BYTES else _in_grains(size, SMALL_SEGMENT_BYTES)


def _in_grains(size: int, grain: int) -> int:
    return -(-size // grain) * grain
