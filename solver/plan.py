"""From a problem to a valid schedule: solve, round, build, improve, validate; where rounding costs time, settle."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .emit import build_schedule
from .improve import fastest, improve
from .parts import settle, settle_whole
from .problem import Problem
from .rounding import round_solution
from .safe import streaming_solution
from .schedule import Schedule
from .simulate import Simulation, memory_highs, simulate
from .solution import Solution, Status
from .solve import solve
from .timing import in_time
from .validate import ScheduleError, validate

_TRIES = 8
_WORTH = 0.02  # part of the program's seconds that rounding must cost before it is worth another solve
_MUCH = 0.05  # that it must cost before whole tensors are worth a program of their own,
_LEAST_S = 1e-3  # and seconds: that program takes as many as ten thousand steps then lose


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


def plan(problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.01, backend: str | None = None) -> Planned:
    """Find a schedule for a problem.

    Whole tensors can need more of the host than fractions do: the program is then solved again with less of it.
    Where rounding costs more than 2 % it is solved again with whole parts (see parts.py), where that costs more than
    5 % in whole tensors (see whole.py), and the fastest schedule is taken.

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
            rest = settle(tried, solution, time_limit_s=time_limit_s, gap=gap, backend=backend)
            while planned.rounding_loss_s > _WORTH * solution.objective_s and (settled := next(rest, None)) is not None:
                planned = _better(problem, planned, settled)
            if planned.rounding_loss_s > max(_MUCH * solution.objective_s, _LEAST_S):
                whole = settle_whole(tried, solution, time_limit_s=time_limit_s, backend=backend)
                planned = planned if whole is None else _better(problem, planned, whole)
            return planned
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
    found = next(filter(_is_valid, (improve(schedule), schedule)), schedule)
    if simulate(found).step_s > (1 + _WORTH) * solution.objective_s:
        found = fastest(found, *filter(_is_valid, in_time(schedule)))
    validate(found)
    simulation = simulate(found)
    return Planned(solution, found, simulation, simulation.step_s - solution.objective_s)


def _is_valid(schedule: Schedule) -> bool:
    """Whether a variant keeps every rule: moves may bring together what was apart."""
    try:
        validate(schedule)
    except ScheduleError:
        return False
    return True


def _better(problem: Problem, planned: Planned, settled: Solution) -> Planned:
    """The faster of a plan and what rounding makes of a solution with whole parts, if that keeps the budgets."""
    schedule = build_schedule(problem, round_solution(problem, settled))
    if max(memory_highs(schedule)) > problem.device_budget_bytes or schedule.host_bytes > problem.host_budget_bytes:
        return planned
    other = _finished(planned.solution, schedule)
    return min(planned, other, key=lambda one: one.rounding_loss_s)


def _streamed(problem: Problem, failed: Solution) -> Planned:
    """The safe plan, with what the failed search knows of the bound; no schedule if it does not fit either."""
    safe = streaming_solution(problem)
    schedule = build_schedule(problem, round_solution(problem, safe))
    if max(memory_highs(schedule)) > problem.device_budget_bytes or schedule.host_bytes > problem.host_budget_bytes:
        return Planned(failed, None, None, 0.0)
    bound_s = min(failed.lower_bound_s, safe.objective_s)
    gap = (safe.objective_s - bound_s) / safe.objective_s if safe.objective_s > 0 else 0.0
    return _finished(replace(safe, lower_bound_s=bound_s, gap=gap, solve_s=failed.solve_s), schedule)
