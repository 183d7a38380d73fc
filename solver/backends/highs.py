"""HiGHS, through its own interface: building the model with pulp took longer than solving it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import highspy
import numpy as np

from ..answer import RawAnswer, trusted
from ..linear import LinearModel
from ..solution import Status

INFINITE = float("inf")
OPTIONS = {"random_seed": 0, "parallel": "off", "output_flag": False}
# The first relaxation takes most of the time: it is degenerate, and an interior-point method is three times as fast.
INTERIOR = {"solver": "ipm", "mip_lp_solver": "ipm"}
SIMPLEX = {"solver": "simplex", "mip_lp_solver": "choose"}


def solve(
    model: LinearModel,
    time_limit_s: float,
    gap: float,
    start: Sequence[float] = (),
    *,
    nodes: int | None = None,
    vertex: bool = True,
) -> RawAnswer:
    """Minimise the model with HiGHS.

    Parameters
    ----------
    time_limit_s: limit on the search, in seconds. gap: relative gap at which the search may end.
    start: a feasible point to begin with, one value per column; empty for none.
    nodes: limit on the nodes of the search tree; unlike a time limit, it makes the answer reproducible.
    vertex: whether the point of a relaxation has to be a vertex; crossover to one can take longer than finding the
        optimum.

    Returns: the same answer every time, unless the time limit ends the search.
    """
    started = time.perf_counter()
    highs = _build(model)
    highs.setOptionValue("mip_rel_gap", gap)
    highs.setOptionValue("run_crossover", "on" if vertex else "off")
    if nodes is not None:
        highs.setOptionValue("mip_max_nodes", nodes)
    if start:
        point = highspy.HighsSolution()
        point.col_value = list(start)
        highs.setSolution(point)
    _run(highs, time_limit_s, INTERIOR)
    answer = _answer(model, highs, started)
    if _refused(highs) or trusted(model, answer) is not answer:
        # Interior points wrongly call small feasible programs infeasible if seconds differ by many magnitudes.
        _run(highs, max(1.0, time_limit_s - (time.perf_counter() - started)), SIMPLEX)
        answer = trusted(model, _answer(model, highs, started))
    return answer


def _run(highs: highspy.Highs, time_limit_s: float, more: dict[str, str]) -> None:
    options: dict[str, Any] = {**OPTIONS, **more, "time_limit": highs.getRunTime() + time_limit_s}
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.run()


def _refused(highs: highspy.Highs) -> bool:
    """Return whether the run ended by itself without reaching an optimum."""
    status = highspy.HighsModelStatus
    return highs.getModelStatus() not in (status.kOptimal, status.kTimeLimit, status.kSolutionLimit)


def _answer(model: LinearModel, highs: highspy.Highs, started: float) -> RawAnswer:
    spent_s = time.perf_counter() - started
    state, info = highs.getModelStatus(), highs.getInfo()
    if state in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return RawAnswer(Status.INFEASIBLE, (), INFINITE, INFINITE, spent_s)
    finished = state == highspy.HighsModelStatus.kOptimal
    objective = info.objective_function_value
    if any(model.integer):
        bound = info.mip_dual_bound
    else:
        bound = objective if finished else -INFINITE
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return RawAnswer(Status.NO_ANSWER, (), INFINITE, bound, spent_s)
    status = Status.OPTIMAL if finished else Status.TIME_LIMIT
    values = tuple(float(v) for v in highs.getSolution().col_value)
    return RawAnswer(status, values, objective, min(bound, objective), spent_s)


def _build(model: LinearModel) -> highspy.Highs:
    """Return the model as HiGHS stores it, row by row."""
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(model.upper), len(model.rows)
    lp.col_cost_ = np.array(model.costs)
    lp.col_lower_ = np.zeros(len(model.upper))
    lp.col_upper_ = np.array(model.upper)
    lp.row_upper_ = np.array([row.bound for row in model.rows])
    lp.row_lower_ = np.array([row.bound if row.equal else -INFINITE for row in model.rows])
    starts = np.cumsum([0, *(len(row.columns) for row in model.rows)])
    count = int(starts[-1])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = starts.astype(np.int32)
    lp.a_matrix_.index_ = np.fromiter((c for row in model.rows for c in row.columns), np.int32, count)
    lp.a_matrix_.value_ = np.fromiter((a for row in model.rows for a in row.coefficients), float, count)
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    if any(model.integer):
        lp.integrality_ = [kinds[integer] for integer in model.integer]
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.passModel(lp)
    return highs
