"""The search for a fast schedule of whole tensors: the candidates found, and the refinements that find more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from .problem import Problem
from .rounding.settle import Resolver
from .schedule import Schedule
from .scheduling.validate import is_valid
from .simulate import simulate
from .solution import Solution


@dataclass(frozen=True)
class Limits:
    """The limits of one solve of the program; the fields are `solve`'s parameters."""

    time_limit_s: float = 60.0
    gap: float = 0.01
    backend: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A schedule that keeps the budgets.

    Parameters
    ----------
    near: the answer, in fractions or in whole parts, from which it was rounded.
    rounded: the schedule as built from the answer's whole tensors. schedule: the same after all improvements so far.
    step_s: simulated seconds of an iteration; infinite if the schedule breaks a rule.
    timed: whether the moves of `rounded` were timed exactly.
    """

    near: Solution
    rounded: Schedule
    schedule: Schedule
    step_s: float
    timed: bool = False


def candidate(near: Solution, rounded: Schedule, schedule: Schedule, *, timed: bool = False) -> Candidate:
    """Return the candidate of a schedule, with its simulated seconds."""
    return Candidate(near, rounded, schedule, simulate(schedule).step_s if is_valid(schedule) else inf, timed)


@dataclass(frozen=True)
class Search:
    """The state of the search for a schedule.

    Parameters
    ----------
    problem: the problem whose budgets a schedule has to keep. tried: the same with budgets that leave room for whole
        tensors.
    solution: the program's answer to `tried`. found: candidates, at least one.
    host_is_full: whether rounding has to keep to the host's budget, too.
    resolver: of `tried` and `solution`, with what it has answered so far; None if there is none yet.
    """

    problem: Problem
    tried: Problem
    solution: Solution
    limits: Limits
    found: tuple[Candidate, ...]
    host_is_full: bool = False
    resolver: Resolver | None = field(default=None, compare=False, repr=False)

    @property
    def best(self) -> Candidate:
        """The fastest candidate, the first of several."""
        return min(self.found, key=lambda one: one.step_s)

    @property
    def loss_s(self) -> float:
        """Simulated seconds of the best schedule minus the program's seconds."""
        return self.best.step_s - self.solution.objective_s

    def loses(self, part: float, least_s: float = 0.0) -> bool:
        """Return whether whole tensors cost more than a part of the program's seconds, and more than `least_s`."""
        return self.loss_s > max(part * self.solution.objective_s, least_s)


class Refinement(Protocol):
    """A pass of the search, with its options as fields. It takes and gives valid schedules only."""

    @property
    def name(self) -> str:
        """A word or two for tables."""
        ...

    def accepts(self, search: Search) -> bool:
        """Return whether the pass is worth its time."""
        ...

    def candidates(self, search: Search) -> Iterator[Candidate]:
        """Yield schedules that may be faster than the best, as long as the pass `accepts` what is found."""
        ...


@dataclass(frozen=True)
class Gain:
    """The gain of one pass.

    Parameters
    ----------
    name: the pass's name. before_s, after_s: seconds of the best schedule minus those of the program, before and after
        the pass; infinite before the first pass. took_s: seconds that the pass took. schedules: how many it tried.
    """

    name: str
    before_s: float
    after_s: float
    took_s: float
    schedules: int

    def __str__(self) -> str:
        before = f", {self.before_s:.4g} s before" if self.before_s < inf else ""
        tried = f"{self.schedules} {'schedule' if self.schedules == 1 else 'schedules'} in {self.took_s:.2g} s"
        return f"{self.name}: {self.after_s:.4g} s above the program's seconds{before} ({tried})"


def refine(search: Search, ladder: Iterable[Refinement], report: Callable[[Gain], None]) -> Search:
    """Run passes one after the other.

    Parameters
    ----------
    report: called with the gain of every pass that was run.
    """
    for refinement in ladder:
        if not refinement.accepts(search):
            continue
        started, before = time.perf_counter(), search
        for one in refinement.candidates(search):
            search = replace(search, found=(*search.found, one))
            if not refinement.accepts(search):
                break
        took_s, tried = time.perf_counter() - started, len(search.found) - len(before.found)
        report(Gain(refinement.name, before.loss_s, search.loss_s, took_s, tried))
    return search
