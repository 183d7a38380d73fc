"""What is allocated and let go in iterations, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Change(NamedTuple):
    """An allocation of `bytes` under a number of its own, or with 0 bytes the end of the allocation of that number.

    `then`: bytes of the allocations that follow at once, before anything can move. `fixed`: it never moves.
    """

    number: int
    bytes: int
    then: tuple[int, ...] = ()
    fixed: bool = False


@dataclass(frozen=True)
class Rehearsal:
    """What is allocated and let go, in order.

    Parameters
    ----------
    stretches: first what training starts with, then iterations. period: by how much the numbers of every further
        iteration's allocations lie above those of the one before.
    """

    stretches: tuple[list[Change], ...]
    period: int = 0

    def played(self, iterations: int) -> Iterator[list[Change]]:
        """What training starts with, and so many iterations."""
        yield from self.stretches[: 1 + iterations]
        for more in range(1, iterations + 2 - len(self.stretches)):
            yield [one._replace(number=one.number + more * self.period) for one in self.stretches[-1]]
