"""CBC, as bundled with pulp."""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import pulp

from ..answer import RawAnswer, trusted
from ..linear import LinearModel
from ..solution import Status

INFINITE = float("inf")
INTERIOR = "barrier"  # for relaxations, which are degenerate: several times as fast as the simplex method


def solve(
    model: LinearModel,
    time_limit_s: float,
    gap: float,
    start: Sequence[float] = (),
    *,
    nodes: int | None = None,
    vertex: bool = True,
) -> RawAnswer:
    """Minimise the model with CBC.

    Parameters
    ----------
    time_limit_s: limit on the search, in seconds; for purely continuous models a limit on processor time. gap: relative
        gap at which the search may end.
    start: not used, since pulp passes CBC no starting point.
    nodes: limit on the nodes of the search tree; unlike a time limit, it makes the answer reproducible.
    vertex: not used; CBC always finds one.

    Returns: the same answer every time, unless the time limit ends the search. The bound is read from CBC's log if the
    search ended early, and is the objective otherwise.
    """
    started = time.perf_counter()
    problem, variables = _to_pulp(model)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        log = Path(folder) / "cbc.log"
        solver = pulp.PULP_CBC_CMD(
            msg=False,
            gapRel=gap,
            timeLimit=time_limit_s,
            maxNodes=nodes,
            logPath=str(log),
            options=["randomCbcSeed 1", *([] if any(model.integer) else [INTERIOR])],
        )
        solver.tmpDir = folder
        problem.solve(solver)
        text = log.read_text()
    spent_s = time.perf_counter() - started
    if problem.status == pulp.LpStatusInfeasible:
        return RawAnswer(Status.INFEASIBLE, (), INFINITE, INFINITE, spent_s)
    bound = _printed_bound(text)
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return RawAnswer(Status.NO_ANSWER, (), INFINITE, -INFINITE if bound is None else bound, spent_s)
    values = tuple(float(v.varValue) for v in variables)
    objective = sum(c * v for c, v in zip(model.costs, values))
    stopped = "Stopped on" in text
    if bound is None:
        bound = -INFINITE if stopped else objective
    status = Status.TIME_LIMIT if stopped else Status.OPTIMAL
    return trusted(model, RawAnswer(status, values, objective, min(bound, objective), spent_s))


def _printed_bound(log: str) -> float | None:
    found = re.findall(r"^Lower bound:\s*(\S+)", log, re.MULTILINE)
    return float(found[-1]) if found else None


def _to_pulp(model: LinearModel) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """Return the model as a pulp problem, and its variables in the order of the columns."""
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
