"""HiGHS through pulp."""

from __future__ import annotations

import time

import highspy
import pulp

from ..linear import LinearModel
from ..solution import Status
from .answer import RawAnswer, to_pulp

INFINITE = float("inf")
# The first relaxation takes most of the time: it is degenerate, and an interior point is three times as fast.
OPTIONS = {"random_seed": 0, "parallel": "off", "mip_lp_solver": "ipm"}


def solve(model: LinearModel, time_limit_s: float, gap: float) -> RawAnswer:
    """Minimise the model with HiGHS.

    Parameters
    ----------
    time_limit_s: limit on the search. gap: relative gap at which the search may end.

    Returns: the same answer every time, unless the time limit ends the search.
    """
    started = time.perf_counter()
    problem, variables = to_pulp(model)
    solver = pulp.HiGHS(msg=False, gapRel=gap, timeLimit=time_limit_s, **OPTIONS)
    solver.solve(problem)
    highs = problem.solverModel
    spent_s = time.perf_counter() - started
    state = highs.getModelStatus()
    if state in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return RawAnswer(Status.INFEASIBLE, (), INFINITE, INFINITE, spent_s)
    info = highs.getInfo()
    bound = info.mip_dual_bound if any(model.integer) else info.objective_function_value
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return RawAnswer(Status.NO_ANSWER, (), INFINITE, bound, spent_s)
    finished = state == highspy.HighsModelStatus.kOptimal
    status = Status.OPTIMAL if finished else Status.TIME_LIMIT
    values = tuple(float(v.varValue) for v in variables)
    return RawAnswer(status, values, info.objective_function_value, min(bound, info.objective_function_value), spent_s)
