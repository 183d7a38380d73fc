"""Allocations and frees of iterations, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Change(NamedTuple):
    """An allocation of `bytes` with its own number, or, with 0 bytes, the end of the allocation with that number.

    `then`: bytes of the allocations that follow at once, before anything can move. `fixed`: whether it never moves.
    """

    number: int
    bytes: int
    then: tuple[int, ...] = ()
    fixed: bool = False


@dataclass(frozen=True)
class Rehearsal:
    """The allocations and frees of a start and some iterations, in order.

    Parameters
    ----------
    stretches: first the allocations that training starts with, then iterations. period: the offset of every further
        iteration's numbers from those of the one before.
    """

    stretches: tuple[list[Change], ...]
    period: int = 0

    def played(self, iterations: int) -> Iterator[list[Change]]:
        """Yield the allocations that training starts with, then those of `iterations` iterations."""
        yield from self.stretches[: 1 + iterations]
        for more in range(1, iterations + 2 - len(self.stretches)):
            yield [one._replace(number=one.number + more * self.period) for one in self.stretches[-1]]
