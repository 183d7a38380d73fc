"""The steps of an iteration as data: for each its block, its direction, and the micro-batches that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise


class Direction(Enum):
    """The direction of a step, or of a part of a schedule; the value is its word."""

    FORWARD = "forward"
    BACKWARD = "backward"
    TURN_AROUND = "turn-around"


class InPasses:
    """An update whose micro-batches run in passes, and what follows from their numbers; a base of dataclasses.

    Parameters
    ----------
    micro_batches: passes per update. per_step: micro-batches of a pass, which every step runs its block for in turn.
    last_per_step: those of the last pass, if they are fewer; 0 if they are as many.
    """

    micro_batches: int
    per_step: int
    last_per_step: int

    @property
    def last_slots(self) -> int:
        """The micro-batches of the last pass."""
        return self.last_per_step or self.per_step

    @property
    def per_update(self) -> int:
        """The micro-batches of an update."""
        return (self.micro_batches - 1) * self.per_step + self.last_slots

    @property
    def adds_up(self) -> bool:
        """True if gradients of several passes are added up."""
        return self.micro_batches > 1

    @property
    def sums_on_device(self) -> bool:
        """True if gradients are added up over passes of several micro-batches, each of them on the device."""
        return self.adds_up and self.per_step > 1


def passes_and_slots(count: int, per_step: int) -> tuple[int, int, int]:
    """Return the fields of `InPasses`, in order, for an update of `count` micro-batches with `per_step` in a pass."""
    per_step = min(per_step, count)
    return -(-count // per_step), per_step, count % per_step


@dataclass(frozen=True)
class Step:
    """One step of an iteration.

    Parameters
    ----------
    block: the block that runs; None in the turn-around.
    of_pass: the number of its pass; the turn-around belongs to the last one.
    micro_batches: the first micro-batch that it runs for, and the one after the last.
    """

    block: int | None
    direction: Direction
    of_pass: int
    micro_batches: tuple[int, int]

    @property
    def times(self) -> int:
        """Number of times that it happens in an iteration."""
        return self.micro_batches[1] - self.micro_batches[0]


def passes_of(micro_batches: int) -> tuple[tuple[int, int], ...]:
    """The micro-batches of each pass: those between the first and the last are alike, so one pass stands for them."""
    ends = sorted({0, min(1, micro_batches - 1), micro_batches - 1, micro_batches})
    return tuple(pairwise(ends))


def steps_of(n_blocks: int, micro_batches: int, turn_around_steps: int) -> tuple[Step, ...]:
    """The steps of an iteration in order: per pass the forwards, then the backwards; then the turn-around.

    An order of micro-batches other than this one is another list.
    """
    passes = passes_of(micro_batches)
    steps = [
        Step(block, direction, number, run_for)
        for number, run_for in enumerate(passes)
        for direction, blocks in (
            (Direction.FORWARD, range(n_blocks)),
            (Direction.BACKWARD, reversed(range(n_blocks))),
        )
        for block in blocks
    ]
    once = (micro_batches - 1, micro_batches)
    return (*steps, *(Step(None, Direction.TURN_AROUND, len(passes) - 1, once) for _ in range(turn_around_steps)))
