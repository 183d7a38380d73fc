"""What every backend for linear models returns, and the model as pulp wants it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pulp

from ..linear import LinearModel, holds
from ..solution import Status


@dataclass(frozen=True)
class RawAnswer:
    """A backend's answer.

    Parameters
    ----------
    values: one per column; empty without a feasible point.
    objective, lower_bound: in the model's own units; infinite without a feasible point, or where none can exist.
    solve_s: seconds spent, building included.
    """

    status: Status
    values: tuple[float, ...]
    objective: float
    lower_bound: float
    solve_s: float


def trusted(model: LinearModel, answer: RawAnswer) -> RawAnswer:
    """The answer; without its point, and so without a plan, if that breaks the model's rows."""
    if not answer.values or holds(model, answer.values):
        return answer
    return replace(answer, status=Status.NO_ANSWER, values=(), objective=float("inf"), lower_bound=-float("inf"))


def to_pulp(model: LinearModel) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """The model as a pulp problem, and its variables in the order of the columns."""
    problem = pulp.LpProblem("plan", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(f"c{i}", 0, None if upper == float("inf") else upper, _category(integer))
        for i, (upper, integer) in enumerate(zip(model.upper, model.integer))
    ]
    problem.addVariables(variables)
    problem.setObjective(pulp.LpAffineExpression([(v, c) for v, c in zip(variables, model.costs) if c]))
    for i, row in enumerate(model.rows):
        terms = pulp.LpAffineExpression([(variables[c], a) for c, a in zip(row.columns, row.coefficients)])
        sense = pulp.LpConstraintEQ if row.equal else pulp.LpConstraintLE
        problem.addConstraint(pulp.LpConstraint(terms, sense, f"r{i}", row.bound))
    return problem, variables


def _category(integer: bool) -> str:
    return pulp.LpInteger if integer else pulp.LpContinuous
