"""Room in one piece: which tensors move aside so that a large one finds place where gaps are large enough together.

A move costs a copy within the device, some hundred times faster than the link; memory left unused for the sake of
order costs such transfers in every iteration.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

LEAST_CUT_BYTES = 1 << 20  # what is left of a large piece is cut off above this, and belongs to it up to this
_PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
_CANDIDATES = 400  # runs whose tensors are tried for place elsewhere, the cheapest first


class Extent(NamedTuple):
    """Where a tensor lies, and whether it may lie elsewhere."""

    start: int
    end: int
    movable: bool


class Run(NamedTuple):
    """A stretch of memory that becomes one gap when the extents in it have moved out, the largest first."""

    start: int
    end: int
    extents: tuple[Extent, ...]


def gaps_between(extents: Sequence[Extent], start: int, end: int) -> list[tuple[int, int]]:
    """Start and end of what lies between extents, which come in order.

    Returns: gaps that an allocator would use.
    """
    edges = [start, *(edge for extent in extents for edge in extent[:2]), end]
    pairs = zip(edges[::2], edges[1::2])
    return [(low, high) for low, high in pairs if high - low > LEAST_CUT_BYTES]


def first_without_place(lengths: Sequence[int], sizes: Sequence[int]) -> int | None:
    """The first of `sizes` that finds no gap, if each takes the smallest that is large enough.

    Parameters
    ----------
    lengths: of the gaps, ascending. sizes: to be allocated together, descending.
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


def cheapest_run(extents: Sequence[Extent], start: int, end: int, size: int) -> Run | None:
    """The run of at least `size` bytes with the least to move, all of which finds place in gaps outside the run.

    Where there is none, one that makes a gap larger than any is now, from which a later call gets on.

    Parameters
    ----------
    extents: in order, between `start` and `end`. size: larger than every gap.
    """
    gaps = gaps_between(extents, start, end)
    largest = max((high - low for low, high in gaps), default=0)
    for part in _PARTS:
        target = largest + max(1, int((size - largest) * part))
        runs = sorted(_runs(extents, start, end, target), key=lambda run: (_moved_bytes(run), run.start))
        for run in runs[:_CANDIDATES]:
            lengths = sorted(high - low for low, high in gaps if high <= run.start or low >= run.end)
            if first_without_place(lengths, [one.end - one.start for one in run.extents]) is None:
                return run
    return None


def _moved_bytes(run: Run) -> int:
    return sum(one.end - one.start for one in run.extents)


def _runs(extents: Sequence[Extent], start: int, end: int, size: int) -> Iterator[Run]:
    """Every shortest run of at least `size` bytes between extents that stay where they are."""
    first, low = 0, start
    for i, extent in enumerate([*extents, Extent(end, end, False)]):
        if not extent.movable:
            yield from _runs_between(extents[first:i], low, extent.start, size)
            first, low = i + 1, extent.end


def _runs_between(extents: Sequence[Extent], start: int, end: int, size: int) -> Iterator[Run]:
    after = 0
    for i in range(len(extents)):
        low = extents[i - 1].end if i else start
        after = max(after, i)
        while after < len(extents) and extents[after].start - low < size:
            after += 1
        high = extents[after].start if after < len(extents) else end
        if high - low < size:
            return
        inside = sorted(extents[i:after], key=lambda one: (one.start - one.end, one.start))
        yield Run(low, high, tuple(inside))
