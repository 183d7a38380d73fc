"""Sets of bytes as ranges of offsets."""

from __future__ import annotations

Range = tuple[int, int]
"""First offset, and the one behind the last."""


def joined(ranges: list[Range]) -> list[Range]:
    """Return the same bytes as few ranges in order."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def without(ranges: list[Range], start: int, end: int) -> list[Range]:
    """Return the bytes of ranges that are not in another one."""
    pieces = [piece for first, last in ranges for piece in ((first, min(last, start)), (max(first, end), last))]
    return [piece for piece in pieces if piece[0] < piece[1]]


def first_missing(ranges: list[Range], start: int, end: int) -> int | None:
    """Return the first offset from `start` to `end` that no range has; None if they have all."""
    for first, last in joined(ranges):
        if first <= start < last:
            start = last
    return start if start < end else None


def within(ranges: list[Range], start: int, end: int) -> list[Range]:
    """Return the bytes of ranges that are in another one."""
    pieces = [(max(first, start), min(last, end)) for first, last in ranges]
    return [piece for piece in pieces if piece[0] < piece[1]]
