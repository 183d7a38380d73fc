"""The passes that make Algorithm 1's schedule faster, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from .polish.improve import fastest, improve
from .polish.in_time import in_time
from .polish.trials import best_of_trials
from .problem import Problem
from .refine import Candidate, Refinement, Search, candidate
from .rounding.groups import round_solution
from .rounding.settle import settle, settle_whole
from .schedule import Schedule
from .scheduling.emit import build_schedule
from .scheduling.validate import is_valid
from .simulate import memory_highs
from .solution import Solution
from .solve import solve


@dataclass(frozen=True)
class Improve:
    """Local moves on Algorithm 1's schedule: earlier updates and prefetches, later frees."""

    name: str = "improve"

    def accepts(self, search: Search) -> bool:
        return search.best.schedule is search.best.rounded

    def candidates(self, search: Search) -> Iterator[Candidate]:
        rounded = search.best.rounded
        yield candidate(search.solution, rounded, improve(rounded))


@dataclass(frozen=True)
class Settle:
    """The program solved again with whole host parts, then with whole parts of states, too.

    Parameters
    ----------
    worth: part of the program's seconds that whole tensors must cost.
    """

    worth: float = 0.02
    name: str = "settle"

    def accepts(self, search: Search) -> bool:
        return search.loses(self.worth)

    def candidates(self, search: Search) -> Iterator[Candidate]:
        limits = search.limits
        for near in settle(
            search.tried,
            search.solution,
            time_limit_s=limits.time_limit_s,
            gap=limits.gap,
            backend=limits.backend,
        ):
            yield from _rounded(search.problem, search.tried, near)


@dataclass(frozen=True)
class Whole:
    """The program in whole tensors.

    Parameters
    ----------
    worth, least_s: part of the program's seconds, and seconds, that whole tensors must cost: it takes as many seconds
        as ten thousand steps then lose.
    room: part of the device that may be left for moves, if without it the answer still loses too much; 0 for none.
    """

    worth: float = 0.05
    least_s: float = 1e-3
    room: float = 0.1
    name: str = "whole tensors"

    def accepts(self, search: Search) -> bool:
        return search.loses(self.worth, self.least_s)

    def candidates(self, search: Search) -> Iterator[Candidate]:
        limits, tried = search.limits, search.tried
        whole = settle_whole(tried, search.solution, time_limit_s=limits.time_limit_s, backend=limits.backend)
        if whole is None:
            return
        yield from _rounded(search.problem, tried, whole)
        roomy = _with_room(tried, self.room)
        if roomy is None:
            return
        near = solve(roomy, time_limit_s=limits.time_limit_s, gap=limits.gap, backend=limits.backend)
        if near.options:
            whole = settle_whole(roomy, near, time_limit_s=limits.time_limit_s, backend=limits.backend)
            yield from _rounded(search.problem, roomy, whole) if whole else ()


@dataclass(frozen=True)
class InTime:
    """Every move at its time, by the simulator's clock.

    Parameters
    ----------
    worth: part of the program's seconds that whole tensors must cost. most: schedules whose moves are timed.
    """

    worth: float = 0.02
    most: int = 2
    name: str = "in time"

    def accepts(self, search: Search) -> bool:
        return search.loses(self.worth)

    def candidates(self, search: Search) -> Iterator[Candidate]:
        done = {id(one.rounded) for one in search.found if one.timed}
        by_rounded = {id(one.rounded): one for one in sorted(search.found, key=lambda one: -one.step_s)}
        left = [one for number, one in by_rounded.items() if number not in done]
        for one in sorted(left, key=lambda one: one.step_s)[: self.most]:
            timed = list(filter(is_valid, in_time(one.rounded)))
            # Where no steady order is found, that is remembered, too.
            yield candidate(one.near, one.rounded, fastest(*timed) if timed else one.schedule, timed=True)


@dataclass(frozen=True)
class Trials:
    """Random shifts of how urgent moves are, under the simulator.

    Parameters
    ----------
    worth, least_s: as for `Whole`. effort, effort_per_s: at most so many simulated actions in all, which takes a few
        seconds, and for every second that a step still loses.
    """

    worth: float = 0.05
    least_s: float = 1e-3
    effort: int = 60_000
    effort_per_s: int = 5_000_000
    name: str = "trials"

    def accepts(self, search: Search) -> bool:
        return search.loses(self.worth, self.least_s)

    def candidates(self, search: Search) -> Iterator[Candidate]:
        def promise_s(one: Candidate) -> float:
            """The less a step takes if moves come in fractions, the more trials are likely to find."""
            return one.step_s + (one.step_s if one.near is search.solution else one.near.objective_s)

        likely = min(search.found, key=promise_s)
        lost_s = likely.step_s - search.solution.objective_s
        work = min(self.effort, int(lost_s * self.effort_per_s)) if lost_s < inf else self.effort
        best = best_of_trials(likely.rounded, work)
        if best is not None:
            yield candidate(likely.near, likely.rounded, best)


LADDER: tuple[Refinement, ...] = (
    Improve(),
    Settle(),
    InTime(),
    Whole(),
    InTime(worth=0.05, name="in time again"),  # of what the program in whole tensors gave
    Trials(),
)


def _rounded(problem: Problem, tried: Problem, near: Solution) -> Iterator[Candidate]:
    """What Algorithm 1 and local moves make of a solution that is nearer to whole tensors, if it keeps the budgets.

    Parameters
    ----------
    near: an answer to `tried`.
    """
    rounded = build_schedule(problem, round_solution(tried, near))
    if keeps_budgets(problem, rounded):
        improved = improve(rounded)
        yield candidate(near, rounded, improved if is_valid(improved) else rounded)


def keeps_budgets(problem: Problem, schedule: Schedule) -> bool:
    """Whether a schedule stays within the problem's budgets."""
    fits = all(used <= tier.capacity_bytes for tier, (_, used) in zip(problem.tiers, schedule.tiers))
    return fits and max(memory_highs(schedule)) <= problem.device_budget_bytes


def without_the_program(ladder: Iterable[Refinement]) -> tuple[Refinement, ...]:
    """The passes of a ladder that need no answer of the program."""
    return tuple(one for one in ladder if isinstance(one, Improve | InTime))


def _with_room(problem: Problem, part: float) -> Problem | None:
    """The problem with as much less of the device as its largest item takes; None if that is more than a part of it."""
    tensors = [t for group in problem.groups for t in group.tensors]
    largest = max(max(t.param_bytes, *(t.piece_bytes(rows) for rows in t.pieces[:1])) for t in tensors)
    if largest > part * problem.device_budget_bytes:
        return None
    return replace(problem, device_budget_bytes=problem.device_budget_bytes - largest)
