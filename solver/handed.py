"""What one step hands to the next, where steps run for several micro-batches: most of it may be away in between.

A step makes a value for all of its micro-batches before the next step reads the first of them. A copy can leave once it
is made, and return while the micro-batch before it computes. Where several steps in a row read a value, it can be away
between any two of them. The first copies, which are read first, and the last, which are made last, would have no time
on the way.

Source: GreedySnake, section 4.2, whose checkpoints between layers do this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from . import items
from .items import Item
from .problem import Problem, Value

UNDER_WAY = 3  # copies on the device beside those that stay: one is made or read, others come or go
_FIRST = 2  # micro-batches whose copies stay: those that are read first, and as many that are made last
_NOISE = 1e-6


@dataclass(frozen=True)
class Hand:
    """What neighbouring steps hand on, in steps of the first pass.

    Parameters
    ----------
    made: the step after whose computes its copies leave. returns: the steps that follow without a gap, and read it.
    bytes: of the most copies that can be away at once.
    left: whether the copies have been away before, so that none has to be made.
    goes_on: whether it is away again after these steps, for a backward, which reads the same copies.
    """

    item: Item
    made: int
    returns: tuple[int, ...]
    bytes: int
    left: bool = False
    goes_on: bool = False

    @property
    def of_leaving(self) -> bool:
        """Whether the value has a copy off the device anyway, if it leaves between its forwards and backwards."""
        return self.left or self.goes_on

    def __str__(self) -> str:
        return f"{self.item},{self.made}"


def most_away(problem: Problem) -> int:
    """Return of how many micro-batches of a step what is handed on may be away at once."""
    return max(0, problem.per_step - 2 * _FIRST) if problem.hands_on else 0


def hands(problem: Problem) -> tuple[Hand, ...]:
    """Return what may be away between neighbouring steps: values, and gradients of values."""
    values = problem.values if most_away(problem) else ()
    return tuple(hand for value in values for hand in _hands_of(problem, value) if hand.bytes)


def _hands_of(problem: Problem, value: Value) -> Iterator[Hand]:
    share = most_away(problem), problem.per_step
    away_bytes, grad_bytes = (whole * share[0] // share[1] for whole in (value.bytes, value.grad_bytes))
    item, gradient, window = items.value(value.name), items.value_gradient(value.name), away_window(problem, value)
    forwards = [u for u in value.uses if window is None or u < problem.n_blocks]
    backwards = [u for u in value.uses if u not in forwards]
    if forwards and _are_neighbours([value.made, *forwards]):
        yield Hand(item, value.made, tuple(forwards), away_bytes, goes_on=bool(backwards))
    if len(backwards) > 1 and _are_neighbours(backwards):
        yield Hand(item, backwards[0], tuple(backwards[1:]), away_bytes, left=True)
    taken = problem.backward_step(value.made)
    if value.grad_steps == (taken - 1,):
        yield Hand(gradient, taken - 1, (taken,), grad_bytes)


def _are_neighbours(steps: list[int]) -> bool:
    return steps == list(range(steps[0], steps[-1] + 1))


def away_window(problem: Problem, value: Value) -> tuple[int, int] | None:
    """Return the first pass's steps in which a value leaves and comes back, None if it would be away for no step."""
    forwards = [value.made, *(u for u in value.uses if u < problem.n_blocks)]
    backwards = [u for u in value.uses if u >= problem.n_blocks]
    if not backwards or backwards[0] - forwards[-1] < 3:
        return None
    return forwards[-1], backwards[0] - 1


def whole_numbers(problem: Problem, parts: Mapping[str, float]) -> dict[str, int]:
    """Return by tier of how many micro-batches something is away, together at least the parts of the most."""
    most, so_far, before = most_away(problem), 0.0, 0
    found: dict[str, int] = {}
    for tier, part in parts.items():
        so_far += part
        found[tier], before = ceil((so_far - _NOISE) * most) - before, ceil((so_far - _NOISE) * most)
    return {tier: number for tier, number in found.items() if number > 0}


def away_slots(problem: Problem, numbers: Mapping[str, int]) -> dict[int, str]:
    """Return the micro-batches of a step whose copies are away, spread evenly, each with its tier."""
    most, tiers = most_away(problem), [tier for tier, number in numbers.items() for _ in range(number)]
    return {_FIRST + (2 * i + 1) * most // (2 * len(tiers)): tier for i, tier in enumerate(tiers)}
