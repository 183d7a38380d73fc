"""Few combinations of values instead of all: what goes wrong mostly takes one value, or two together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def covering(*axes: Sequence[Any], allowed: Callable[..., bool] = lambda *row: True) -> list[tuple[Any, ...]]:
    """Combinations, in the order of their product, among which is every pair of values of two axes.

    Parameters
    ----------
    allowed: of a combination, whether it makes sense; a pair that is in none that does need not occur.
    """
    every = {row: set(combinations(enumerate(row), 2)) for row in product(*axes) if allowed(*row)}
    missing, chosen = set[Any]().union(*every.values()), set()
    while missing:
        best = max(every, key=lambda row: len(every[row] & missing))
        chosen.add(best)
        missing -= every[best]
    return [row for row in every if row in chosen]
