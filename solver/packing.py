"""Places in one memory for tensors: those that are never there at the same time may overlap."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

ALIGN_BYTES = 64  # of every place: a line of the CPU's cache
_REMEMBERED = 64  # packings that a process caches, since small moves of a schedule change few times


class Tenant(NamedTuple):
    """Something that needs a place.

    Parameters
    ----------
    bytes: of its place. times: a bit for each time at which it is there, the lowest for time 0.
    """

    bytes: int
    times: int


class Packed(NamedTuple):
    """The places, by tenant, and the bytes from the first to the end of the last."""

    places: tuple[int, ...]
    bytes: int


def span_of(first: int, length: int, n_times: int) -> int:
    """Return the bits of `length` times from the first on; times are cyclic."""
    length = min(length, n_times)
    ahead = ((1 << length) - 1) << first
    return (ahead | ahead >> n_times) & ((1 << n_times) - 1)


@lru_cache(maxsize=_REMEMBERED)
def packed(tenants: tuple[Tenant, ...]) -> Packed:
    """Place tenants one after the other, each where it fits lowest, in the best of a few orders.

    First come those with the most bytes, with the most bytes times duration, or with the longest duration.
    """
    orders = {
        tuple(sorted(range(len(tenants)), key=lambda k, first=first: (first(tenants[k]), tenants[k].times, k)))  # type: ignore[misc]
        for first in (_by_bytes, _by_area, _by_duration)
    }
    return min((_placed(tenants, order) for order in sorted(orders)), key=lambda found: found.bytes)


def _by_bytes(one: Tenant) -> int:
    return -one.bytes


def _by_area(one: Tenant) -> int:
    return -one.bytes * one.times.bit_count()


def _by_duration(one: Tenant) -> tuple[int, int]:
    return -one.times.bit_count(), -one.bytes


def _placed(tenants: tuple[Tenant, ...], order: Sequence[int]) -> Packed:
    starts = [0] * len(tenants)
    placed: list[tuple[int, int, int]] = []  # start, end, times; ascending
    for k in order:
        size, times = tenants[k]
        starts[k] = _lowest(placed, aligned(size), times)
        placed.append((starts[k], starts[k] + aligned(size), times))
        placed.sort()
    return Packed(tuple(starts), max((end for _, end, _ in placed), default=0))


def aligned(size_bytes: int) -> int:
    """Return the bytes of a place, a multiple of ALIGN_BYTES."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _lowest(placed: Sequence[tuple[int, int, int]], size: int, times: int) -> int:
    """Return the lowest start of a free stretch at these times."""
    end = 0
    for start, until, others in placed:
        if others & times:
            if start - end >= size:
                return end
            end = max(end, until)
    return end
