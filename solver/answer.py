"""What every backend for linear models returns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .linear import LinearModel, holds
from .solution import Status


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
