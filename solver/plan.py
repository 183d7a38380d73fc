"""From a problem to a valid schedule: solve, round, build, improve, validate; where rounding costs time, settle."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .polish.improve import fastest, improve
from .polish.in_time import in_time
from .polish.trials import best_of_trials
from .problem import Problem
from .program.streamed import streaming_solution
from .rounding.groups import round_solution
from .rounding.settle import settle, settle_whole
from .schedule import Schedule
from .scheduling.emit import build_schedule
from .scheduling.validate import is_valid, validate
from .simulate import Simulation, memory_highs, simulate
from .solution import Solution, Status
from .solve import solve

_TRIES = 8
_WORTH = 0.02  # part of the program's seconds that rounding must cost before it is worth another solve
_MUCH = 0.05  # that it must cost before whole tensors are worth a program of their own,
_LEAST_S = 1e-3  # and seconds: that program takes as many as ten thousand steps then lose
_ROOM = 0.1  # part of the device that may be left for moves in whole tensors
_TRIED = 60_000  # actions in all trials, some seconds; and so many for every second that a step loses
_TRIED_PER_S = 5_000_000


@dataclass(frozen=True)
class Planned:
    """What planning found.

    Parameters
    ----------
    solution: the program's last answer, in fractions; its status says why there is no schedule, if there is none.
    schedule, simulation: the schedule, valid for the problem's budgets, and its dry run; None if there is none.
    rounding_loss_s: simulated seconds above the fractional plan's, negative if the simulator finds more overlap.
    """

    solution: Solution
    schedule: Schedule | None
    simulation: Simulation | None
    rounding_loss_s: float


@dataclass(frozen=True)
class _Found:
    """A plan, its schedule before moves were improved, and what a step takes if moves come in fractions."""

    planned: Planned
    rough: Schedule
    fluid_s: float

    @property
    def promise_s(self) -> float:
        """The less, the more trials are likely to find."""
        return self.planned.rounding_loss_s + self.fluid_s


def plan(problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.01, backend: str | None = None) -> Planned:
    """Find a schedule for a problem.

    Whole tensors can need more of the host than fractions do: the program is then solved again with less of it.
    Where rounding costs more than 2 % it is solved again with whole parts (see rounding/settle.py), where that costs
    more than 5 % in whole tensors (see rounding/whole.py); the fastest schedule is taken, and searched around (see
    polish/trials.py) where even that costs more than 5 %.

    Parameters
    ----------
    time_limit_s, gap, backend: as in `solve`; the limit is for each solve.

    Returns: the schedule; the safe one that streams everything if the limit was too short for any other; or none, with
    the status of the solve that failed.
    Raises: BackendError if the backend is not installed.
    Source: OffMate, section 4.2.
    """
    solution = solve(problem, time_limit_s=time_limit_s, gap=gap, backend=backend)
    if not solution.options:  # too little time, or numbers so far apart that the solver was wrong
        return _streamed(problem, solution)
    tried, found = problem, solution
    for attempt in range(1, _TRIES + 1):
        if not solution.options:
            break
        schedule = build_schedule(problem, round_solution(tried, solution))
        device = max(memory_highs(schedule)) - problem.device_budget_bytes
        host = schedule.host_bytes - problem.host_budget_bytes
        if device <= 0 and host <= 0:
            planned = _finished(solution, schedule)
            first = _Found(planned, schedule, solution.objective_s + planned.rounding_loss_s)
            return _refined(problem, tried, first, time_limit_s=time_limit_s, gap=gap, backend=backend)
        tried = replace(
            tried,
            device_budget_bytes=max(0, tried.device_budget_bytes - attempt * max(0, device)),
            host_budget_bytes=max(0, tried.host_budget_bytes - attempt * max(0, host)),
        )
        solution = solve(tried, time_limit_s=time_limit_s, gap=gap, backend=backend)
    if found.options:  # fractions fit, whole tensors do not: the safe plan's may
        return _streamed(problem, replace(found, status=Status.INFEASIBLE))
    return Planned(solution, None, None, 0.0)


def _finished(solution: Solution, schedule: Schedule) -> Planned:
    """The best that improvement makes of a schedule; where it stays slow, with every move at its time."""
    found = next(filter(is_valid, (improve(schedule), schedule)), schedule)
    if simulate(found).step_s > (1 + _WORTH) * solution.objective_s:
        found = fastest(found, *filter(is_valid, in_time(schedule)))
    validate(found)
    return _timed(solution, found)


def _timed(solution: Solution, schedule: Schedule) -> Planned:
    simulation = simulate(schedule)
    return Planned(solution, schedule, simulation, simulation.step_s - solution.objective_s)


def _refined(
    problem: Problem, tried: Problem, first: _Found, *, time_limit_s: float, gap: float, backend: str | None
) -> Planned:
    """The best of a plan and what rounding makes of solutions that are nearer to whole tensors."""
    solution, found = first.planned.solution, [first]

    def loses(part: float, least_s: float = 0.0) -> bool:
        lost_s = min(one.planned.rounding_loss_s for one in found)
        return lost_s > max(part * solution.objective_s, least_s)

    settled = settle(tried, solution, time_limit_s=time_limit_s, gap=gap, backend=backend)
    while loses(_WORTH) and (near := next(settled, None)) is not None:
        found += _rounded(problem, solution, near)
    if loses(_MUCH, _LEAST_S):
        whole = settle_whole(tried, solution, time_limit_s=time_limit_s, backend=backend)
        found += _rounded(problem, solution, whole) if whole else []
        roomy = _with_room(tried) if whole and loses(_MUCH, _LEAST_S) else None
        if roomy is not None and (near := solve(roomy, time_limit_s=time_limit_s, gap=gap, backend=backend)).options:
            whole = settle_whole(roomy, near, time_limit_s=time_limit_s, backend=backend)
            found += _rounded(problem, solution, whole, roomy) if whole else []
    planned = [one.planned for one in found]
    if loses(_MUCH, _LEAST_S):
        likely = min(found, key=lambda one: one.promise_s)
        work = min(_TRIED, int(likely.planned.rounding_loss_s * _TRIED_PER_S))
        best = best_of_trials(likely.rough, work)
        planned += [_timed(solution, best)] if best else []
    return min(planned, key=lambda one: one.rounding_loss_s)


def _with_room(problem: Problem) -> Problem | None:
    """The problem with as much less of the device as its largest item takes; None if that is much."""
    tensors = [t for group in problem.groups for t in group.tensors]
    largest = max(max(t.param_bytes, *(t.piece_bytes(rows) for rows in t.pieces[:1])) for t in tensors)
    if largest > _ROOM * problem.device_budget_bytes:
        return None
    return replace(problem, device_budget_bytes=problem.device_budget_bytes - largest)


def _rounded(problem: Problem, solution: Solution, near: Solution, tried: Problem | None = None) -> list[_Found]:
    """What rounding makes of a solution that is nearer to whole tensors, if that keeps the budgets.

    Parameters
    ----------
    near: an answer to `tried`, which is the problem if there is none.
    """
    schedule = build_schedule(problem, round_solution(tried or problem, near))
    if max(memory_highs(schedule)) > problem.device_budget_bytes or schedule.host_bytes > problem.host_budget_bytes:
        return []
    return [_Found(_finished(solution, schedule), schedule, near.objective_s)]


def _streamed(problem: Problem, failed: Solution) -> Planned:
    """The safe plan, with what the failed search knows of the bound; no schedule if it does not fit either."""
    safe = streaming_solution(problem)
    schedule = build_schedule(problem, round_solution(problem, safe))
    if max(memory_highs(schedule)) > problem.device_budget_bytes or schedule.host_bytes > problem.host_budget_bytes:
        return Planned(failed, None, None, 0.0)
    bound_s = min(failed.lower_bound_s, safe.objective_s)
    gap = (safe.objective_s - bound_s) / safe.objective_s if safe.objective_s > 0 else 0.0
    return _finished(replace(safe, lower_bound_s=bound_s, gap=gap, solve_s=failed.solve_s), schedule)
