"""What training would need on another machine, without a whole plan: the least memory, and roughly the seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..capture.model import trace_model
from ..machines.hardware import Hardware
from ..optim.updater import Updater
from ..progress import Progress
from ..solver.plan import plan as solve_problem
from ..solver.problem import Problem
from ..solver.refinements import Improve
from ..solver.schedule import Schedule
from ..solver.simulate import simulate
from ..solver.solve import least_budget, least_host_within_device
from .elsewhere import as_elsewhere
from .request import Request
from .solver_errors import solver_errors
from .subject import Subject, state, user_bytes_of

_LIMIT_S = 600.0  # of a search; of 80 layers on busy cores it takes more than a minute
_WHOLE_TENSORS = 1.02  # whole tensors need a little more than fractions of them


@dataclass(frozen=True)
class Rough:
    """A rough plan: seconds per step, and the bytes at most on the device and on the host."""

    step_s: float
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Outlook:
    """A problem on another machine; nothing is solved until it is asked for.

    Parameters
    ----------
    problem: with the host budget of the request. fixed_bytes: those on the device that no decision changes.
    """

    problem: Problem
    fixed_bytes: int

    @cached_property
    def least_device_bytes(self) -> int | None:
        """The least device budget that works with the host budget; None if none does."""
        with solver_errors():
            found = least_budget(self.problem, time_limit_s=_LIMIT_S)
        return None if found.resource == "host" else found.bytes + self.fixed_bytes

    @property
    def fits(self) -> bool:
        """Return whether both budgets suffice, if tensors could be split."""
        least = self.least_device_bytes
        return least is not None and least <= self.problem.device_budget_bytes + self.fixed_bytes

    @cached_property
    def least_host_bytes(self) -> int | None:
        """About the least host memory with which the device budget suffices; None if none does."""
        with solver_errors():
            least = least_host_within_device(self.problem, time_limit_s=_LIMIT_S)
        return None if least is None else int(least * _WHOLE_TENSORS)

    def rough(self) -> Rough | None:
        """Make a plan with few of the planner's passes, a few percent slower than its own; None if none is found."""
        problem = self.problem
        quick = replace(problem, rates=problem.rates.with_endless_host_memory)
        with solver_errors():
            found = solve_problem(quick, ladder=(Improve(),))
        if found.schedule is None:
            return None
        schedule: Schedule = replace(found.schedule, rates=problem.rates)
        simulation = simulate(schedule)
        return Rough(simulation.step_s, simulation.peak_bytes + self.fixed_bytes, schedule.host_layout.used_bytes)


def outlooks_elsewhere(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    updaters: Sequence[Updater | None],
    machine: Hardware,
    say: Progress = lambda phase, share: None,
) -> Iterator[Outlook]:
    """Yield the outlook with each optimizer; the model is traced once, as `plan_elsewhere` does.

    Raises: CaptureError; InfeasibleBudget if the budget does not even hold the model's buffers.
    """
    with as_elsewhere(model, (args, kwargs)) as ((args, kwargs), real):
        traced = trace_model(model, args, kwargs, request.config, True, say, real, None)
        request = replace(request, user_bytes=user_bytes_of(traced, request))
        for updater in updaters:
            _, lowered, fixed = state(Subject(model, args, kwargs, traced, request, updater, machine, say))
            yield Outlook(lowered.problem, fixed)
