"""SELECT, a knapsack: the subset of whole tensors whose size is at least a target and as close to it as possible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import gcd

_FEW = 18  # items for which exact sums are tabulated, up to 2**18 of them
_MOST_UNITS = 1 << 26  # a set of reachable sums with this many members is one integer of 8 MiB


def select(sizes: Mapping[str, int] | Iterable[tuple[str, int]], target_bytes: int) -> frozenset[str]:
    """Return the subset whose total is at least the target and as close to it as possible.

    Exact for up to 18 items, and for more as long as the total is at most 2**26 times the sizes' common divisor;
    otherwise the total exceeds the least possible one by at most one part in 2**26 per item. Ties go to fewer items,
    then to the first names (for up to 18 items; for more the choice is fixed).

    Parameters
    ----------
    sizes: bytes of each item, not negative.
    target_bytes: the total that the subset must reach; nothing is selected if it is 0 or below.

    Returns: the names selected.
    Raises: ValueError if all items together do not reach the target.
    Source: OffMate, appendix B, SELECT.
    """
    items = tuple(sorted(sizes.items() if isinstance(sizes, Mapping) else sizes))
    if target_bytes <= 0:
        return frozenset()
    total = sum(size for _, size in items)
    if total < target_bytes:
        raise ValueError(f"items of {total} bytes cannot reach a target of {target_bytes} bytes")
    if total == target_bytes:
        return frozenset(name for name, size in items if size > 0)
    return _select(tuple((name, size) for name, size in items if size > 0), target_bytes)


@lru_cache(maxsize=4096)
def _select(items: tuple[tuple[str, int], ...], target: int) -> frozenset[str]:
    sizes = [size for _, size in items]
    mask = _by_sums(sizes, target) if len(items) <= _FEW else _by_bits(sizes, target)
    last = len(items) - 1
    return frozenset(name for i, (name, _) in enumerate(items) if mask >> (last - i) & 1)


def _by_sums(sizes: list[int], target: int) -> int:
    """Solve by dynamic programming over reachable sums; the first item is the highest bit of the answer.

    Of two subsets with equal sum and count, the one with the larger mask has the first names.
    """
    best: dict[int, tuple[int, int]] = {0: (0, 0)}
    least, answer = sum(sizes) + 1, (0, 0)
    for i, size in enumerate(sizes):
        bit = 1 << (len(sizes) - 1 - i)
        for reached, (count, mask) in list(best.items()):
            total, found = reached + size, (count - 1, mask | bit)
            if total > least:
                continue
            if total >= target:
                if total < least or found > answer:
                    least, answer = total, found
            elif total not in best or found > best[total]:
                best[total] = found
    return answer[1]


def _by_bits(sizes: list[int], target: int) -> int:
    """Solve over the bits of an integer: bit s says that sum s is reachable, in units of the common divisor."""
    unit = max(gcd(*sizes), -(-sum(sizes) // _MOST_UNITS))
    # Rounding sizes down and the target up keeps the subset's true total at or above the target.
    units = [size // unit for size in sizes]
    goal = min(-(-target // unit), sum(units))
    reach = [1]
    for size in units:
        reach.append(reach[-1] | reach[-1] << size)
    above = reach[-1] >> goal
    left = goal + (above & -above).bit_length() - 1
    mask = 0
    for i in range(len(sizes) - 1, -1, -1):
        if left < 0 or not reach[i] >> left & 1:
            mask |= 1 << (len(sizes) - 1 - i)
            left -= units[i]
    return mask if unit == gcd(*sizes) else _reaching(sizes, mask, target)


def _reaching(sizes: list[int], mask: int, target: int) -> int:
    """Return `mask` with the smallest missing items added until it reaches the target."""
    last = len(sizes) - 1
    total = sum(size for i, size in enumerate(sizes) if mask >> (last - i) & 1)
    for size, i in sorted((size, i) for i, size in enumerate(sizes)):
        if total >= target:
            break
        if not mask >> (last - i) & 1:
            mask, total = mask | 1 << (last - i), total + size
    return mask
