"""A plan's problem as it is stated later, when storage paths have other rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..lowering.problem import Lowered
from ..optim.updater import Updater
from ..plans.plan import Plan
from ..profile.store import Measured
from ..progress import Progress
from ..solver.plan import Planned
from ..solver.problem import Problem
from .earlier import fingerprints
from .low_precision import of_plan
from .planner import parts_of, subject_of, trace_once
from .request import Request
from .subject import in_low, state, with_steps


class Restated(NamedTuple):
    """The problem of a plan as it is stated now. `measured` are its costs, and `fingerprint` is the request's."""

    plan: Plan
    fingerprint: str
    measured: Measured
    lowered: Lowered

    @property
    def problem(self) -> Problem:
        """What is to be solved."""
        return self.lowered.problem

    def planned(self, found: Planned) -> Plan:
        """Return the plan with what was found instead."""
        parts = parts_of(self.measured, self.lowered, found)
        return replace(self.plan, fingerprint=self.fingerprint, **parts, other_order=None, break_even=None)


def restated(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    updater: Updater | None,
    say: Progress,
    plan: Plan,
) -> Restated:
    """State the problem of a plan again, with what holds now.

    Parameters
    ----------
    model, args, kwargs, request, updater, say: as in `make_plan`.

    Raises: CaptureError, InfeasibleBudget.
    """
    traced = trace_once(model, args, kwargs, request, say)()
    subject = subject_of(model, args, kwargs, traced, request, updater, None, say)
    known_as = fingerprints(subject)[0]
    subject = in_low(subject, of_plan(plan, subject.traced))
    if plan.problem is not None:
        subject = with_steps(subject, plan.problem)
    measured, lowered, _ = state(subject)
    return Restated(plan, known_as, measured, lowered)
