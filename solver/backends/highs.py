"""HiGHS through pulp."""

from __future__ import annotations

import time
from typing import Any

import highspy
import pulp

from ..linear import LinearModel
from ..solution import Status
from .answer import RawAnswer, to_pulp

INFINITE = float("inf")
OPTIONS = {"random_seed": 0, "parallel": "off"}
# The first relaxation takes most of the time: it is degenerate, and an interior point is three times as fast.
FIRST = {"mip_lp_solver": "ipm"}
_INFEASIBLE = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)


def solve(model: LinearModel, time_limit_s: float, gap: float) -> RawAnswer:
    """Minimise the model with HiGHS.

    Parameters
    ----------
    time_limit_s: limit on the search. gap: relative gap at which the search may end.

    Returns: the same answer every time, unless the time limit ends the search.
    """
    started = time.perf_counter()
    problem, variables = to_pulp(model)
    _run(problem, time_limit_s, gap, FIRST)
    if problem.solverModel.getModelStatus() in _INFEASIBLE:
        # An interior point wrongly finds small feasible programs infeasible when seconds differ by many magnitudes.
        left_s = max(1.0, time_limit_s - (time.perf_counter() - started))
        problem, variables = to_pulp(model)
        _run(problem, left_s, gap, {})
    highs = problem.solverModel
    spent_s = time.perf_counter() - started
    state = highs.getModelStatus()
    if state in _INFEASIBLE:
        return RawAnswer(Status.INFEASIBLE, (), INFINITE, INFINITE, spent_s)
    info = highs.getInfo()
    bound = info.mip_dual_bound if any(model.integer) else info.objective_function_value
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return RawAnswer(Status.NO_ANSWER, (), INFINITE, bound, spent_s)
    finished = state == highspy.HighsModelStatus.kOptimal
    status = Status.OPTIMAL if finished else Status.TIME_LIMIT
    values = tuple(float(v.varValue) for v in variables)
    return RawAnswer(status, values, info.objective_function_value, min(bound, info.objective_function_value), spent_s)


def _run(problem: pulp.LpProblem, time_limit_s: float, gap: float, more: dict[str, Any]) -> None:
    pulp.HiGHS(msg=False, gapRel=gap, timeLimit=time_limit_s, **OPTIONS, **more).solve(problem)
