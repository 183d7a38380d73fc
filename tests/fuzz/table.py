"""The table of actions: what each is called, how often it is taken, and where in a training step it may happen."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .worlds import Setup, World

Work = Callable[[World, random.Random], None]

AFTER_FORWARD, BETWEEN, AFTER_BACKWARD = "after forward", "between micro-batches", "after backward"
_INNER = 0.06  # how often something happens at a place inside a training step; much of it is refused, which ends all
_REFUSED = 0.1  # how much less often what is refused is taken, so that most sequences run whole
PLACES = (AFTER_FORWARD, BETWEEN, AFTER_BACKWARD)


@dataclass(frozen=True)
class Entry:
    """An action that can be taken.

    Parameters
    ----------
    weight: how often, beside the others. needs: what the kind of model must have. inside: whether it may happen in the
    middle of a training step. reads: whether it reads what a planned update may have changed already. pauses: whether
    others may happen inside it. refused: the kind of plans that clearly refuse it: "planned", "ungated" or "all".
    """

    name: str
    work: Work
    weight: float
    needs: frozenset[str]
    inside: bool
    reads: bool
    pauses: bool
    refused: str

    def often(self, setup: Setup) -> float:
        """Its weight with a setup."""
        plans = {"all", *(("planned",) if setup.planned else ()), *(("ungated",) if setup.ungated else ())}
        return self.weight * (_REFUSED if self.refused in plans else 1)


@dataclass(frozen=True)
class Act:
    """An action taken: what it draws follows from `seed`; `inner` happen at places inside it."""

    name: str
    seed: int
    inner: tuple[tuple[str, Act], ...] = ()


TABLE: dict[str, Entry] = {}


def action(
    weight: float = 1.0,
    needs: str = "",
    inside: bool = False,
    reads: bool = False,
    pauses: bool = False,
    refused: str = "",
) -> Callable[[Work], Work]:
    """Enter a function into the table, under its name in words."""

    def enter(work: Work) -> Work:
        name = work.__name__.replace("_", " ")
        TABLE[name] = Entry(name, work, weight, frozenset(needs.split()), inside, reads, pauses, refused)
        return work

    return enter


def fitting(setup: Setup, has: frozenset[str]) -> list[Entry]:
    """Actions that make sense with a setup."""
    own = has | {"planned" if setup.planned else "unplanned"}
    return [entry for entry in TABLE.values() if entry.needs <= own]


def draw(setup: Setup, has: frozenset[str], rng: random.Random) -> tuple[Act, ...]:
    """Five to eleven actions."""
    entries = fitting(setup, has)
    return tuple(_act(setup, entries, rng) for _ in range(rng.randint(5, 11)))


def _act(setup: Setup, entries: list[Entry], rng: random.Random) -> Act:
    entry = rng.choices(entries, [e.often(setup) for e in entries])[0]
    inner = []
    for place in PLACES if entry.pauses else ():
        # Where updates happen in the backward, reading then shows them; that is documented, and logged.
        early = place == AFTER_BACKWARD and setup.ungated
        allowed = [e for e in entries if e.inside and not (early and e.reads)]
        if rng.random() < _INNER and allowed:
            found = rng.choices(allowed, [e.often(setup) for e in allowed])[0]
            inner.append((place, Act(found.name, rng.randrange(2**31))))
    return Act(entry.name, rng.randrange(2**31), tuple(inner))


def perform(world: World, act: Act) -> None:
    """Take an action in a world."""
    world.pauses = dict(act.inner)
    TABLE[act.name].work(world, random.Random(act.seed))


def pause(world: World, place: str) -> None:
    """Do what is to be done at this place inside an action, once."""
    act: Any = world.pauses.pop(place, None)
    if act is not None:
        world.tell(f"# {place}: {act.name}")
        TABLE[act.name].work(world, random.Random(act.seed))
