"""The caching allocator's rules, as far as they decide how much it reserves.

What a device's own allocator does is what counts; this is for what cannot be asked of it: how much more than a budget
some allocations would take. Source: c10/cuda/CUDACachingAllocator.cpp, default settings.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from typing import NamedTuple

_GRAIN_BYTES = 512  # every piece is a multiple of it
_SMALL_BYTES = 1 << 20  # the most that comes from small segments; what is left of a large piece is cut off above it
SMALL_SEGMENT_BYTES = 1 << 21
_LARGE_SEGMENT_BYTES, _OWN_SEGMENT_BYTES = 20 << 20, 10 << 20  # from the latter on a segment has its request's size


class Change(NamedTuple):
    """An allocation of `bytes` under a number of its own, or with 0 bytes the end of the allocation of that number."""

    number: int
    bytes: int


class Pools:
    """Pieces of segments, those of small allocations apart from the others.

    State: `reserved_bytes`, of all segments; the free pieces of each pool by size and place, and where they start and
    end; the allocations' pieces by number.

    Parameters
    ----------
    segment_bytes: of a first large segment.
    """

    def __init__(self, segment_bytes: int) -> None:
        self.reserved_bytes = 0
        self._next = 0
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._sizes: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._live: dict[int, tuple[int, int, bool]] = {}
        if segment_bytes:
            self._put(*self._segment(segment_bytes), False)

    def change(self, change: Change) -> None:
        """Make a change."""
        if not change.bytes:
            self._let_go(*self._live.pop(change.number))
            return
        size = _rounded(change.bytes, _GRAIN_BYTES)
        small = size <= _SMALL_BYTES
        start, length = self._take(size, small) or self._segment(_segment_bytes(size))
        if length - size >= _GRAIN_BYTES if small else length - size > _SMALL_BYTES:
            self._put(start + size, length - size, small)
            length = size
        self._live[change.number] = start, length, small

    def layout(self) -> tuple[tuple[int, int, bool], ...]:
        """Where everything lies that is allocated, in the order in which it was."""
        return tuple(self._live.values())

    def _take(self, size: int, small: bool) -> tuple[int, int] | None:
        """The smallest free piece that is large enough."""
        free = self._free[small]
        at = bisect.bisect_left(free, (size, 0))
        if at == len(free):
            return None
        length, start = free.pop(at)
        del self._sizes[start], self._starts[start + length]
        return start, length

    def _segment(self, length: int) -> tuple[int, int]:
        start = self._next
        self._next += length + 1  # neighbouring segments are not one
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


def most_reserved_bytes(stretches: Iterable[Iterable[Change]], segment_bytes: int) -> int:
    """What is reserved in the end, nothing being given back, when these changes follow a first large segment.

    Parameters
    ----------
    stretches: what there is at the start, then iterations; once one ends as an earlier one did, the rest repeats it.
    """
    pools = Pools(segment_bytes)
    seen: set[Hashable] = set()
    for stretch in stretches:
        for change in stretch:
            pools.change(change)
        state = pools.reserved_bytes, pools.layout()
        if state in seen:
            break
        seen.add(state)
    return pools.reserved_bytes


def pool_peaks(changes: Iterable[Change]) -> tuple[int, int]:
    """The most bytes held at once in large allocations, and what the segments for the small ones take at least.

    Caching allocators keep what is small in segments of its own, so that it does not cut up the large ones.
    """
    live: dict[int, int] = {}
    held, peak = [0, 0], [0, 0]
    for change in changes:
        size = _rounded(change.bytes, _GRAIN_BYTES) or -live.pop(change.number)
        if change.bytes:
            live[change.number] = size
        kind = int(abs(size) <= _SMALL_BYTES)
        held[kind] += size
        peak[kind] = max(peak[kind], held[kind])
    return peak[0], _rounded(peak[1], SMALL_SEGMENT_BYTES)


def _segment_bytes(size: int) -> int:
    if size <= _SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return _LARGE_SEGMENT_BYTES if size < _OWN_SEGMENT_BYTES else _rounded(size, SMALL_SEGMENT_BYTES)


def _rounded(size: int, grain: int) -> int:
    return -(-size // grain) * grain
