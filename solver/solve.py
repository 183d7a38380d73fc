"""The solution of a problem, and the least budgets with which it can be solved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf
from typing import Literal

from .answer import RawAnswer
from .backends import default, get
from .linear import evaluate
from .problem import Problem
from .program.model import Goal, Program, state_program
from .program.readback import read_solution
from .program.search import search
from .solution import Solution, Status

ALIGN_BYTES = 256
MARGIN = 1e-6  # relative; covers the solvers' tolerance on a row
_FULL = 1e-4  # part of the host budget that is left when it is full
_REMEMBERED = 32  # problems whose least budget a process caches


@dataclass(frozen=True)
class LeastBudget:
    """The smallest budget with which a problem has a plan, however slow.

    Parameters
    ----------
    bytes: the device budget; the host budget if no device budget suffices.
    step: the step that binds, None for the host.
    block: name of the block that computes in that step, "turn-around" or "host".
    resource: which budget `bytes` is of.
    """

    bytes: int
    step: int | None
    block: str
    resource: Literal["device", "host"]


class NoAnswer(RuntimeError):
    """The time limit ended the search before a budget was found."""


def solve(problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.01, backend: str | None = None) -> Solution:
    """Solve for the fastest plan in fractions.

    Parameters
    ----------
    time_limit_s: seconds for the search. gap: relative gap to the bound at which it may end.
    backend: "highs" or "cbc"; by default the first that is installed.

    Returns: a solution; its status says whether it holds a plan. Its seconds are infinite if it does not.
    Raises: BackendError if the backend is not installed.
    Source: OffMate, section 4.1.
    """
    program, answer = _minimise(problem, "time", time_limit_s, gap, backend)
    if answer.values:
        return read_solution(program, answer)
    bound_s = max(0.0, answer.lower_bound * program.time_unit_s - program.traffic_slack_s)
    return Solution(answer.status, inf, bound_s, 0.0 if answer.status is Status.INFEASIBLE else inf, answer.solve_s)


def fills_host(problem: Problem, solution: Solution) -> bool:
    """Return whether more host memory could give a better plan than a solution, or one at all."""
    return not solution.options or solution.host_bytes > (1 - _FULL) * problem.host_budget_bytes


def least_budget(
    problem: Problem, *, time_limit_s: float = 60.0, gap: float = 1e-4, backend: str | None = None
) -> LeastBudget:
    """Find the smallest device budget with which `problem` has a plan, however slow, under its host budget.

    Parameters
    ----------
    time_limit_s: seconds for the search. gap: relative gap to the bound at which it may end.

    Returns: bytes with which the problem is feasible, rounded up; those of the host if the host budget is too small for
    any plan.
    Raises: NoAnswer if the time limit was too short.
    """
    # Plans of one problem for several device budgets share the answer, so it is found once.
    return _least_budget(replace(problem, device_budget_bytes=0), time_limit_s, gap, backend)


@lru_cache(maxsize=_REMEMBERED)
def _least_budget(problem: Problem, time_limit_s: float, gap: float, backend: str | None) -> LeastBudget:
    program, answer = _minimise(problem, "device", time_limit_s, gap, backend)
    if answer.status is Status.INFEASIBLE:
        needed = least_host(problem, time_limit_s=time_limit_s, gap=gap, backend=backend)
        return LeastBudget(needed, None, "host", "host")
    rows = [(evaluate(terms, _point(answer)), step) for step, terms in program.device_rows]
    most, step = max(rows, key=lambda row: row[0])
    block = problem.block_of(step)
    name = "turn-around" if block is None else problem.blocks[block].name
    return LeastBudget(_round_up(most), step, name, "device")


def least_host(problem: Problem, *, time_limit_s: float = 60.0, gap: float = 1e-4, backend: str | None = None) -> int:
    """Find the smallest host budget in bytes with which `problem` has a plan, with unlimited device memory.

    Raises: NoAnswer if the time limit was too short.
    """
    program, answer = _minimise(problem, "host", time_limit_s, gap, backend)
    return _round_up(max(evaluate(row, _point(answer)) for row in program.host))


def least_host_within_device(
    problem: Problem, *, time_limit_s: float = 60.0, gap: float = 1e-4, backend: str | None = None
) -> int | None:
    """Find the smallest host budget in bytes with which `problem` has a plan within its device budget.

    Returns: None if no host budget suffices. Raises: NoAnswer if the time limit was too short.
    """
    program, answer = _minimise(problem, "host within device", time_limit_s, gap, backend)
    if answer.status is Status.INFEASIBLE:
        return None
    return _round_up(max(evaluate(row, _point(answer)) for row in program.host))


def _minimise(
    problem: Problem, goal: Goal, time_limit_s: float, gap: float, backend: str | None
) -> tuple[Program, RawAnswer]:
    program = state_program(problem, goal)
    solver = get(backend) if backend else default()
    return program, search(problem, program, solver, time_limit_s, gap)


def _point(answer: RawAnswer) -> tuple[float, ...]:
    if not answer.values:
        raise NoAnswer(f"no budget was found: {answer.status.value}")
    return answer.values


def _round_up(amount_bytes: float) -> int:
    """Return a multiple of ALIGN_BYTES that the solvers' tolerance cannot push below what is needed."""
    return ceil(amount_bytes * (1 + MARGIN) / ALIGN_BYTES) * ALIGN_BYTES
