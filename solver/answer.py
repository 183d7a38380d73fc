"""The answer that every backend for linear models returns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .linear import LinearModel, holds
from .solution import Status


@dataclass(frozen=True)
class RawAnswer:
    """A backend's answer.

    Parameters
    ----------
    values: one value per column; empty if there is no feasible point.
    objective, lower_bound: in the model's own units; infinite if no feasible point was found or none exists.
    solve_s: seconds spent, including those for building the model.
    """

    status: Status
    values: tuple[float, ...]
    objective: float
    lower_bound: float
    solve_s: float


def trusted(model: LinearModel, answer: RawAnswer) -> RawAnswer:
    """Return the answer, without its point (and so without a plan) if the point violates rows of the model."""
    if not answer.values or holds(model, answer.values):
        return answer
    return replace(answer, status=Status.NO_ANSWER, values=(), objective=float("inf"), lower_bound=-float("inf"))
