"""The way from a problem to a valid schedule: solve, round by Algorithm 1, refine, validate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import NamedTuple

from .algorithm_1 import algorithm_1, near_the_fractions
from .handed import most_away
from .problem import Problem
from .program.streamed import streaming_solution
from .refine import Candidate, Gain, Limits, Refinement, Search, candidate, refine
from .refinements import LADDER, where_memory_is_shared, without_the_program
from .rounding.spilled import whole_schedule
from .schedule import Schedule
from .scheduling.validate import validate
from .simulate import Simulation, keeps_budgets, simulate
from .solution import Solution, Status
from .solve import fills_host, least_host_within_device, solve

_WORTH_SHARING = 0.01  # of the host's budget; for less than that no second search is made
_WORTH_FILES = 0.05  # of a step that the program must gain from parameters or values in files before they are tried
_WORTH_HANDING_ON = 0.01  # the same, from values that leave between neighbouring steps
_WORTH_HOST_UPDATES = 0.02  # the same, from updates on the host of states in files
# Host budgets that are tried for whole tensors, in those that fractions need.
_SHARES = (1.02, 1.05, 1.1, 1.3, 2.0)


@dataclass(frozen=True)
class Planned:
    """The result of planning.

    Parameters
    ----------
    solution: the program's last answer, in fractions; if there is no schedule, its status says why.
    schedule, simulation: the schedule, valid for the problem's budgets, and its dry run; None if no schedule was found.
    rounding_loss_s: simulated seconds above the fractional plan's, negative if the simulator finds more overlap.
    gains: the gain of each pass, in order.
    host_is_full: whether rounding had to keep to the host's budget.
    """

    solution: Solution
    schedule: Schedule | None
    simulation: Simulation | None
    rounding_loss_s: float
    gains: tuple[Gain, ...] = ()
    host_is_full: bool = False


def plan(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.01,
    backend: str | None = None,
    ladder: Iterable[Refinement] = LADDER,
    report: Callable[[Gain], None] | None = None,
) -> Planned:
    """Find a schedule for a problem.

    The program's fractions become whole tensors by Algorithm 1. These can need more of the budgets than fractions do:
    the program is then solved again with smaller budgets. Where whole tensors cost time, passes look for a faster
    schedule (see refinements.py), and the fastest is taken. Where the host's memory limits copies and updates together,
    the schedule that is planned without this limit is taken if it is faster under it. Where the host's memory is full,
    a second search lets what is there at different times share it. Trained parameters, activations and interface values
    leave to files, the host updates states in files, parameters are cast from float32 copies, and values leave between
    neighbouring steps, only where there is no plan without that, or a faster one with it.

    Parameters
    ----------
    time_limit_s, gap, backend: as in `solve`; the limit applies to each solve.
    ladder: the passes after Algorithm 1, in order. report: called with the gain of each pass.

    Returns: the schedule; the safe one that streams everything if no other was found; or none, with the status of the
    solve that failed.
    Raises: BackendError if the backend is not installed.
    Source: OffMate, section 4.2 and appendix B.
    """
    limits, ladder = Limits(time_limit_s, gap, backend), tuple(ladder)
    found = _in_files(problem.without_handing_on, limits, ladder, report)
    if most_away(problem) and _gains_from_handing_on(problem, found, limits):
        other = _in_files(problem, limits, ladder, report)
        found = other if found.schedule is None or _seconds(other) < _seconds(found) else found
    return found


def _gains_from_handing_on(problem: Problem, found: Planned, limits: Limits) -> bool:
    """Return whether there is no plan yet, or a faster program where values leave between neighbouring steps."""
    if found.schedule is None:
        return True
    best = solve(problem, time_limit_s=limits.time_limit_s, gap=limits.gap, backend=limits.backend)
    now_s = min(_seconds(found), found.solution.objective_s)
    return bool(best.options) and best.objective_s < (1 - _WORTH_HANDING_ON) * now_s


def _in_files(
    problem: Problem, limits: Limits, ladder: tuple[Refinement, ...], report: Callable[[Gain], None] | None
) -> Planned:
    """Plan, and let more leave to files where there is no plan without that, or a faster one with it."""
    states_only = problem.with_values_in_ram
    in_ram = states_only.with_host_updates_in_ram.without_casts
    found = _in_time(in_ram.with_parameters_in_ram, limits, ladder, report)
    ways = [in_ram] if problem.parameter_tiers else []
    if problem.host_update_tier is not None:
        ways += [states_only.with_parameters_in_ram, *([states_only] if problem.parameter_tiers else [])]
    ways += [problem] if problem.value_tiers or problem.cast_tier is not None else []
    program_s = found.solution.objective_s
    for way in dict.fromkeys(ways):
        worth = _WORTH_FILES if way.value_tiers or way.host_update_tier is None else _WORTH_HOST_UPDATES
        if found.schedule is None:
            found = _in_time(way, limits, ladder, report)
            program_s = found.solution.objective_s
        elif (solved := _if_files_gain(way, found, limits, (1 - worth) * program_s)) is not None:
            # RAM is full, so what is there at different times shares it.
            other = _planned(replace(way, host_in_time=True), limits, ladder, report, found, solved)
            # Whether or not whole tensors keep its gain: what has hardly a better program is not searched for.
            program_s = solved.solution.objective_s
            found = other if _seconds(other) < _seconds(found) else found
    return found


def _seconds(found: Planned) -> float:
    return found.simulation.step_s if found.simulation is not None else inf


class _Solved(NamedTuple):
    """A program's answer, and the problem that it is of."""

    problem: Problem
    solution: Solution


def _if_files_gain(problem: Problem, found: Planned, limits: Limits, within_s: float) -> _Solved | None:
    """Solve the program in which files may hold more; return None unless it takes less than some seconds."""
    full = found.host_is_full or fills_host(problem, found.solution)
    if problem.host_update_tier is not None:
        full = full or (found.schedule is not None and bool(found.schedule.states_in_files))
        problem = replace(problem, host_in_time=True)  # gradients wait in RAM
    if not full:
        return None
    best = solve(problem, time_limit_s=limits.time_limit_s, gap=limits.gap, backend=limits.backend)
    gains = bool(best.options) and best.objective_s < within_s
    return _Solved(problem, best) if gains else None


def _in_time(
    problem: Problem,
    limits: Limits,
    ladder: tuple[Refinement, ...],
    report: Callable[[Gain], None] | None,
) -> Planned:
    """Plan, and where the host's memory is full, let what is there at different times share it."""
    first = _searched(_with_endless_host_memory(problem), limits, ladder, report)
    if _would_share(problem, first):
        in_time = _planned(replace(problem, host_in_time=True), limits, ladder, report, first)
        return in_time if in_time.schedule is not None else _at_its_rate(problem, limits, ladder, report, first)
    found = _at_its_rate(problem, limits, ladder, report, first)
    if found is first or not _would_share(problem, found):
        return found
    in_time = _planned(replace(problem, host_in_time=True), limits, ladder, report, found)
    return in_time if in_time.schedule is not None else found


def _would_share(problem: Problem, found: Planned) -> bool:
    """Return whether the host's memory is full, of more than a little that is there for a part of the iteration."""
    if problem.host_in_time:
        return False
    if found.schedule is None or found.host_is_full:
        return True
    little = found.schedule.passing_bytes < _WORTH_SHARING * problem.host_budget_bytes
    return fills_host(problem, found.solution) and not little


def planned_host(
    problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.01, backend: str | None = None
) -> int | None:
    """Find a host budget with which a plan is found within the device budget, near the least that fractions need.

    Parameters
    ----------
    time_limit_s, gap, backend: as in `plan`.

    Returns: bytes with which `plan` finds a schedule; None if twice the bytes that fractions need do not suffice.
    Raises: BackendError if the backend is not installed; NoAnswer if the time limit was too short.
    """
    least = least_host_within_device(problem, time_limit_s=time_limit_s, backend=backend)
    if least is None:
        return None
    limits = Limits(time_limit_s, gap, backend)
    for share in _SHARES:
        tried = replace(problem, host_budget_bytes=ceil(share * least))
        solution = solve(tried, time_limit_s=time_limit_s, gap=gap, backend=backend)
        # A search that fails tries more than this, and takes several times as long.
        if solution.options and near_the_fractions(tried, solution, limits, host_is_full=True) is None:
            continue
        found = plan(tried, time_limit_s=time_limit_s, gap=gap, backend=backend, ladder=())
        if found.schedule is not None:
            return tried.host_budget_bytes
    return None


def _planned(
    problem: Problem,
    limits: Limits,
    ladder: tuple[Refinement, ...],
    report: Callable[[Gain], None] | None,
    other: Planned | None = None,
    solved: _Solved | None = None,
) -> Planned:
    """Plan, first without the rate of the host's memory if it has one; `other` and `solved` are as in `_searched`."""
    ignoring = _searched(_with_endless_host_memory(problem), limits, ladder, report, other, solved)
    return _at_its_rate(problem, limits, ladder, report, ignoring, solved)


def _with_endless_host_memory(problem: Problem) -> Problem:
    rates = problem.rates
    return replace(problem, rates=rates.with_endless_host_memory) if rates.host_memory_shares else problem


def _at_its_rate(
    problem: Problem,
    limits: Limits,
    ladder: tuple[Refinement, ...],
    report: Callable[[Gain], None] | None,
    ignoring: Planned,
    solved: _Solved | None = None,
) -> Planned:
    """Plan again at the rate of the host's memory, if it has one, from a plan that ignores it."""
    if not problem.rates.host_memory_shares:
        return ignoring
    return _searched(problem, limits, where_memory_is_shared(ladder), report, ignoring, solved)


def _searched(
    problem: Problem,
    limits: Limits,
    ladder: tuple[Refinement, ...],
    report: Callable[[Gain], None] | None,
    other: Planned | None = None,
    solved: _Solved | None = None,
) -> Planned:
    """Solve, round and refine.

    Parameters
    ----------
    other: a plan for the same machine at other rates, where the search may begin. solved: an answer, which is taken if
        it is of the same problem.
    """
    gains: list[Gain] = []

    def note(gain: Gain) -> None:
        gains.append(gain)
        if report is not None:
            report(gain)

    also: tuple[Candidate, ...] = ()
    if other is not None and other.schedule is not None:
        schedule = replace(other.schedule, rates=problem.rates)
        also = (candidate(other.solution, schedule, schedule),)
    started = time.perf_counter()
    if solved is not None and solved.problem == problem:
        solution = solved.solution
    else:
        solution = solve(problem, time_limit_s=limits.time_limit_s, gap=limits.gap, backend=limits.backend)
    if not solution.options:  # too little time, or coefficients so far apart that the solver failed
        return _streamed(problem, solution, ladder, gains, also)
    search = algorithm_1(problem, solution, limits) or near_the_fractions(problem, solution, limits)
    if search is None:  # fractions fit, but whole tensors do not; those of the safe plan may
        return _streamed(problem, replace(solution, status=Status.INFEASIBLE), ladder, gains, also)
    note(Gain("algorithm 1", inf, search.loss_s, time.perf_counter() - started, 1))
    search = replace(search, found=(*search.found, *also))
    return _taken(refine(search, ladder, note), tuple(gains))


def _taken(search: Search, gains: tuple[Gain, ...]) -> Planned:
    """Return the best schedule of a search, validated and simulated."""
    schedule = search.best.schedule
    validate(schedule)
    simulation = simulate(schedule)
    lost_s = simulation.step_s - search.solution.objective_s
    return Planned(search.solution, schedule, simulation, lost_s, gains, search.host_is_full)


def _streamed(
    problem: Problem,
    failed: Solution,
    ladder: Iterable[Refinement],
    gains: list[Gain],
    also: tuple[Candidate, ...] = (),
) -> Planned:
    """Return the safe plan, with the failed search's bound; no schedule if neither it nor those of `also` fit."""
    safe = streaming_solution(problem)
    rounded = whole_schedule(problem, problem, safe)
    fits = keeps_budgets(problem, rounded)
    if not fits and not also:
        return Planned(failed, None, None, 0.0)
    bound_s = min(failed.lower_bound_s, safe.objective_s)
    gap = (safe.objective_s - bound_s) / safe.objective_s if safe.objective_s > 0 else 0.0
    solution = replace(safe, lower_bound_s=bound_s, gap=gap, solve_s=failed.solve_s)
    found = (*([candidate(solution, rounded, rounded)] if fits else []), *also)
    search = Search(problem, problem, solution, Limits(), found)
    return _taken(refine(search, without_the_program(ladder), gains.append), tuple(gains))
