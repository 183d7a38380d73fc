"""Budget sweeps: one plan's problem solved for several budgets."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..errors import ArgumentTypeError, ArgumentValueError
from ..sizes import parse_budget
from ..solver.plan import plan as solve_problem
from ..solver.problem import Problem, update_steps
from .plan import Plan, check_plan

_LONGEST_S = 1e9


@dataclass(frozen=True)
class SweepPoint:
    """A budget, and the prediction of a step within it.

    Parameters
    ----------
    predicted_step_s, predicted_peak_bytes, host_bytes, lower_bound_s: as in a plan; None if no plan fits.
    least_budget_bytes: the smallest device budget that works.
    """

    budget_bytes: int
    least_budget_bytes: int
    predicted_step_s: float | None = None
    predicted_peak_bytes: int | None = None
    host_bytes: int | None = None
    lower_bound_s: float | None = None

    @property
    def fits(self) -> bool:
        """Return whether a plan stays within the budget."""
        return self.predicted_step_s is not None


def sweep(plan: Plan, budgets: Iterable[int | str], time_limit_s: float = 20.0) -> Iterator[SweepPoint]:
    """Solve a plan's problem again for other device budgets, without capturing or measuring anything again.

    Parameters
    ----------
    plan: a plan of the model for any budget. budgets: in bytes, or text such as "12GiB". time_limit_s: for each search.

    The plan's own budget is not solved again. A plan for a smaller budget fits a larger one too, so no point is slower
    than an earlier one with less memory.

    Returns: one point per budget, as they are found.
    Raises: ArgumentTypeError, ArgumentValueError if the plan holds no problem (a forward-only plan), a budget is no
        size, or the time limit is no number above 0.
    """
    check_plan(plan)
    if isinstance(budgets, str | bytes) or not isinstance(budgets, Iterable):
        raise ArgumentTypeError(f"budgets is {reprlib.repr(budgets)}; it must be a list of sizes, such as ['4GiB']")
    number = isinstance(time_limit_s, int | float) and not isinstance(time_limit_s, bool)
    if not number or not 0 < time_limit_s <= _LONGEST_S:
        raise ArgumentValueError(
            f"time_limit_s is {reprlib.repr(time_limit_s)}; it must be in seconds, above 0, at most {_LONGEST_S:g}"
        )
    if plan.problem is None:
        raise ArgumentValueError("this plan is forward-only; it has no training step to sweep over")
    best: SweepPoint | None = None
    for budget_bytes in map(parse_budget, budgets):
        point = SweepPoint(budget_bytes, plan.least_budget_bytes)
        if budget_bytes < plan.least_budget_bytes:
            yield point
            continue
        problem = _within(plan.problem, budget_bytes - plan.fixed_bytes)
        point = _as_planned(plan, point) if problem == plan.problem else _solved(plan, problem, point, time_limit_s)
        if not point.fits:
            yield point
            continue
        if best is not None and best.budget_bytes <= budget_bytes and _faster(best, point):
            point = replace(best, budget_bytes=budget_bytes, lower_bound_s=point.lower_bound_s)
        best = point
        yield point


def _within(problem: Problem, device_budget_bytes: int) -> Problem:
    """Return the problem for another device budget, with the steps for updates that a plan for it would have."""
    steps = problem.turn_around_steps
    if problem.gate and steps == update_steps(problem.groups, problem.device_budget_bytes):
        steps = update_steps(problem.groups, device_budget_bytes)
    return replace(problem.with_turn_around_steps(steps), device_budget_bytes=device_budget_bytes)


def _as_planned(plan: Plan, point: SweepPoint) -> SweepPoint:
    return replace(
        point,
        predicted_step_s=plan.predicted_step_s,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        host_bytes=plan.host_bytes,
        lower_bound_s=plan.lower_bound_s,
    )


def _solved(plan: Plan, problem: Problem, point: SweepPoint, time_limit_s: float) -> SweepPoint:
    found = solve_problem(problem, time_limit_s=time_limit_s)
    if found.schedule is None or found.simulation is None:
        return point
    return replace(
        point,
        predicted_step_s=found.simulation.step_s,
        predicted_peak_bytes=found.simulation.peak_bytes + plan.fixed_bytes,
        host_bytes=found.schedule.host_layout.used_bytes,
        lower_bound_s=found.solution.lower_bound_s,
    )


def _faster(a: SweepPoint, b: SweepPoint) -> bool:
    return a.predicted_step_s is not None and b.predicted_step_s is not None and a.predicted_step_s < b.predicted_step_s
