"""The passes that make Algorithm 1's schedule faster, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from .algorithm_1 import algorithm_1
from .polish.improve import fastest, improve
from .polish.in_time import in_time
from .polish.trials import best_of_trials
from .problem import Problem
from .refine import Candidate, Refinement, Search, candidate, refine
from .rounding.settle import Resolver, settle, settle_whole
from .rounding.spilled import whole_schedule
from .scheduling.emit import counted_to
from .scheduling.validate import is_valid
from .simulate import keeps_budgets
from .solution import Solution
from .solve import solve

_LEAST_STEPS = 3  # of the turn-around: updates start, and what they made can leave and come back


@dataclass(frozen=True)
class Improve:
    """Local moves on every schedule that is still as it was built: earlier updates and prefetches, later frees."""

    name: str = "improve"

    def accepts(self, search: Search) -> bool:
        return any(one.schedule is one.rounded for one in search.found)

    def candidates(self, search: Search) -> Iterator[Candidate]:
        for one in [one for one in search.found if one.schedule is one.rounded]:
            yield candidate(one.near, one.rounded, improve(one.rounded))


@dataclass(frozen=True)
class Settle:
    """Solve the program again with whole host parts, then with whole parts of states, too.

    Where the program's fractions fill the memory, no whole tensors near them may fit. Those near the fractions of a
    program with less memory do.

    Parameters
    ----------
    worth: fraction of the program's seconds that whole tensors must cost for the pass to run.
    rooms: fractions of the device budget that are left free, one after the other, until whole tensors fit.
    """

    worth: float = 0.005
    rooms: tuple[float, ...] = (0.0, 0.02, 0.08)
    name: str = "settle"

    def accepts(self, search: Search) -> bool:
        return search.loses(self.worth)

    def candidates(self, search: Search) -> Iterator[Candidate]:
        limits, tried = search.limits, search.tried
        how: dict[str, Any] = {"time_limit_s": limits.time_limit_s, "gap": limits.gap, "backend": limits.backend}
        resolver = search.resolver or Resolver(tried, search.solution, **how)
        for room in self.rooms:
            budget_bytes = int(tried.device_budget_bytes * (1 - room))
            near = solve(replace(tried, device_budget_bytes=budget_bytes), **how) if room else search.solution
            settled = settle(resolver, near, host_is_full=search.host_is_full) if near.options else ()
            found = False
            for whole in settled:
                known = any(one.near is whole for one in search.found)
                found = found or known
                for one in () if known else _rounded(search, tried, whole):
                    found = True
                    yield one
            if found:
                return


@dataclass(frozen=True)
class Whole:
    """Solve the program in whole tensors.

    Parameters
    ----------
    worth, least_s: fraction of the program's seconds, and seconds, that whole tensors must cost for the pass to run: at
        that loss, the seconds that the pass takes are lost again in about ten thousand steps.
    room: fraction of the device budget that may be left free for moves, if the answer otherwise still loses too much; 0
        for none.
    """

    worth: float = 0.02
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
        yield from _rounded(search, tried, whole)
        roomy = _with_room(tried, self.room)
        if roomy is None:
            return
        near = solve(roomy, time_limit_s=limits.time_limit_s, gap=limits.gap, backend=limits.backend)
        if near.options:
            whole = settle_whole(roomy, near, time_limit_s=limits.time_limit_s, backend=limits.backend)
            yield from _rounded(search, roomy, whole) if whole else ()


@dataclass(frozen=True)
class LessMemory:
    """Solve the program with a little less device memory, so that copies of whole tensors have room.

    Parameters
    ----------
    worth: fraction of the program's seconds that whole tensors must cost for the pass to run. rooms: fractions of the
        device budget that are left free, one after the other.
    """

    worth: float = 0.05
    rooms: tuple[float, ...] = (0.01, 0.02)
    name: str = "less memory"

    def accepts(self, search: Search) -> bool:
        return search.loses(self.worth)

    def candidates(self, search: Search) -> Iterator[Candidate]:
        limits = search.limits
        for room in self.rooms:
            tried = replace(search.tried, device_budget_bytes=int(search.tried.device_budget_bytes * (1 - room)))
            near = solve(tried, time_limit_s=limits.time_limit_s, gap=limits.gap, backend=limits.backend)
            yield from _rounded(search, tried, near) if near.options else ()


@dataclass(frozen=True)
class InTime:
    """List scheduling: every move at its time, by the simulator's clock.

    Parameters
    ----------
    worth: fraction of the program's seconds that whole tensors must cost for the pass to run. most: schedules whose
        moves are timed.
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
            # `timed` also marks schedules for which no steady order was found, so that they are not tried again.
            yield candidate(one.near, one.rounded, fastest(*timed) if timed else one.schedule, timed=True)


@dataclass(frozen=True)
class Trials:
    """Local search: random shifts of how urgent moves are, under the simulator.

    Parameters
    ----------
    worth, least_s: as for `Whole`. effort, effort_per_s: limits on the simulated actions of all trials: in total (a few
        seconds), and per second that a step still loses.
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
            """Estimate how promising a candidate is: trials find more if its step is short with fractional moves."""
            return one.step_s + (one.step_s if one.near is search.solution else one.near.objective_s)

        likely = min(search.found, key=promise_s)
        lost_s = likely.step_s - search.solution.objective_s
        work = min(self.effort, int(lost_s * self.effort_per_s)) if lost_s < inf else self.effort
        best = best_of_trials(likely.rounded, work)
        if best is not None:
            yield candidate(likely.near, likely.rounded, best)


_FIRST: tuple[Refinement, ...] = (Improve(), Settle(), InTime(), Whole())


@dataclass(frozen=True)
class OtherSteps:
    """Behind a gate: solve the program with fewer turn-around steps, or with more, and count their actions to its own.

    Each step of an update phase holds the states of whole tensors. Longer steps hold more of them, and shorter ones end
    sooner: which of the two loses less depends on the tensors. With several micro-batches neither was seen to help.

    Parameters
    ----------
    worth, least_s: as for `Whole`. shares: steps, in those of the problem, one after the other.
    """

    worth: float = 0.05
    least_s: float = 1e-3
    shares: tuple[float, ...] = (0.75, 1.5)
    name: str = "other steps"

    def accepts(self, search: Search) -> bool:
        one_pass = search.problem.micro_batches == 1
        return search.problem.gate and one_pass and search.loses(self.worth, self.least_s)

    def candidates(self, search: Search) -> Iterator[Candidate]:
        limits, problem = search.limits, search.problem
        for steps in (round(share * problem.turn_around_steps) for share in self.shares):
            if steps < _LEAST_STEPS:
                continue
            other = problem.with_turn_around_steps(steps)
            near = solve(other, time_limit_s=limits.time_limit_s, gap=limits.gap, backend=limits.backend)
            own = algorithm_1(other, near, limits) if near.options else None
            if own is not None:
                best = refine(own, _FIRST, lambda gain: None).best
                rounded, schedule = (counted_to(one, other, problem) for one in (best.rounded, best.schedule))
                yield candidate(best.near, rounded, schedule, timed=best.timed)


LADDER: tuple[Refinement, ...] = (
    *_FIRST,
    InTime(worth=0.05, name="in time again"),  # for the schedules that the program in whole tensors gave
    OtherSteps(),
    Trials(),
)


def _rounded(search: Search, tried: Problem, near: Solution) -> Iterator[Candidate]:
    """Round a solution nearer to whole tensors, improve it locally, and yield it if it keeps the budgets.

    Parameters
    ----------
    near: an answer to `tried`.
    """
    rounded = whole_schedule(search.problem, tried, near, host_is_full=search.host_is_full)
    if keeps_budgets(search.problem, rounded):
        improved = improve(rounded)
        yield candidate(near, rounded, improved if is_valid(improved) else rounded)


def without_the_program(ladder: Iterable[Refinement]) -> tuple[Refinement, ...]:
    """Return the passes of a ladder that need no answer of the program."""
    return tuple(one for one in ladder if isinstance(one, Improve | InTime))


def where_memory_is_shared(ladder: Iterable[Refinement]) -> tuple[Refinement, ...]:
    """Return the passes of a ladder that find something where copies and updates share the host's memory.

    Fractions keep it busy in every step and whole tensors cannot, so that trials are lost. Room for copies helps.
    """
    kept = tuple(one for one in ladder if isinstance(one, Improve | Settle) or one == InTime())
    return (*kept, LessMemory()) if kept else kept


def _with_room(problem: Problem, part: float) -> Problem | None:
    """Return the problem with the device budget less its largest item; None if that exceeds a part of the budget."""
    tensors = [t for group in problem.groups for t in group.tensors]
    largest = max(max(t.param_bytes, *(t.piece_bytes(rows) for rows in t.pieces[:1])) for t in tensors)
    if largest > part * problem.device_budget_bytes:
        return None
    return replace(problem, device_budget_bytes=problem.device_budget_bytes - largest)
