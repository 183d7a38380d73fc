"""A plan for a batch of the size that was asked for, or of the one that the solver predicts to be the fastest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..capture.checks import as_batch
from ..capture.kv_caches import without_cache
from ..machines.devices import accelerator, rng_untouched
from ..machines.hardware import Hardware
from ..optim.updater import Updater
from ..plans.plan import Plan
from ..progress import Progress, planning_progress
from ..runtime.current import entered
from ..solver.batch_size import WORTH
from .accumulation import of_update, planned_with_fewest
from .batch_size import batch_size_of, fastest_batch_size, planned_within, resized
from .before_gate import with_break_even
from .placement import fitted, pockets
from .planner import make_plan, plan_elsewhere, trace_once
from .request import Prepared, Request
from .subject import Subject

_SIZING_S = 20.0  # time limit of the search for one batch size
_MOST_TURNS = 4  # searches for a batch size that suits a number of micro-batches

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@contextlib.contextmanager
def ready(
    model: torch.nn.Module, example_inputs: dict[str, Any] | tuple[Any, ...], where: torch.device | None
) -> Iterator[tuple[Batch, Progress]]:
    """Put a model into training mode for a plan; give its batch and what reports progress, and leave all as it was."""
    args, kwargs = as_batch(example_inputs)
    modes = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()
    kwargs = without_cache(model, kwargs)
    try:
        with planning_progress() as say, torch.enable_grad(), rng_untouched(where), entered(where):
            yield (args, kwargs), say
    finally:
        for module, mode in modes.items():
            module.training = mode


@dataclass(frozen=True)
class Sizing:
    """What a plan is for, but for the size of its batch.

    Parameters
    ----------
    machine: another machine; None for this one. fewest: whether the number of micro-batches is to be found, too.
    """

    model: torch.nn.Module
    batch: Batch
    request: Request
    updater: Updater | None
    machine: Hardware | None
    say: Progress
    fewest: bool

    def plan(self, batch_size: int | Literal["auto"] | None) -> Plan:
        """Plan for so many samples, or for the batch as it is.

        Parameters
        ----------
        batch_size: in samples; "auto" stands for the size that the solver predicts to be the fastest.

        Raises: InfeasibleBudget, and OffmateError for what cannot be planned.
        """
        if batch_size is None:
            return self._compared(self._planned(None))
        if batch_size != "auto":
            return self._compared(replace(self._planned(batch_size), batch_size=batch_size))
        plan = planned_within(replace(self, fewest=False)._planned, batch_size_of(self.batch))
        fastest = self._fastest_size(plan)
        if self.fewest or fastest != plan.batch_size:
            plan = planned_within(self._planned, fastest)
        return self._compared(self._together(plan) if self.fewest else plan)

    def _fastest_size(self, plan: Plan) -> int:
        """Return the batch size with the most samples per second, in updates of as many micro-batches as a plan's."""
        assert plan.problem is not None and plan.batch_size is not None
        config = self.request.config
        limit_s = min(config.solver_time_limit_s, _SIZING_S)
        return fastest_batch_size(plan.problem, plan.batch_size, limit_s, config.solver_gap, self.say)

    def _together(self, plan: Plan) -> Plan:
        """Improve a batch size and a number of micro-batches in turn, until neither brings more samples per second.

        Parameters
        ----------
        plan: with the number that is best for its batch size.
        """
        seen = {plan.batch_size}
        for _ in range(_MOST_TURNS):
            size = self._fastest_size(plan)
            if size in seen:
                break
            other = planned_within(self._planned, size)
            seen |= {size, other.batch_size}
            if other.samples_per_s <= WORTH * plan.samples_per_s:
                break
            plan = other
        return plan

    def _compared(self, plan: Plan) -> Plan:
        """Return the plan with its comparison to updates before the gate, if the request asks for both."""

        def again(own: Request) -> Plan:
            own = of_update(own, plan.accumulation_steps, plan.micro_batches_per_pass) if self.fewest else own
            return replace(self, request=own, fewest=False)._planned(plan.batch_size)

        return with_break_even(plan, again, self.request, self.machine is not None)

    def _planned(self, batch_size: int | None) -> Plan:
        args, kwargs = self.batch if batch_size is None else resized(self.batch, batch_size)
        request = self.request.speculating(False) if self.request.chooses else self.request
        if self.machine is not None:
            given = self.updater, self.machine, self.say
            return plan_elsewhere(self.model, args, kwargs, request, *given, fewest=self.fewest)
        return _plan_here(self.model, args, kwargs, request, self.updater, self.say, self.fewest)


def _plan_here(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    updater: Updater | None,
    say: Progress,
    fewest: bool,
) -> Plan:
    """Plan for this machine; on a card, with room for what its allocator takes beyond the tensors."""
    where = accelerator(request.device)
    trace = trace_once(model, args, kwargs, request, say)

    def make(own: Request) -> Plan:
        if where is None:
            return make_plan(model, args, kwargs, own, updater, say, trace=trace).plan

        def with_margin(margin_bytes: int) -> Prepared:
            return make_plan(model, args, kwargs, replace(own, margin_bytes=margin_bytes), updater, say, trace=trace)

        held = pockets(where, model, (args, kwargs))
        plan = fitted(with_margin, model, updater, where, own.budget_bytes)[0].plan
        del held
        return plan

    if not fewest:
        return make(request)
    return planned_with_fewest(Subject(model, args, kwargs, trace(), request, updater, None, say), make)
