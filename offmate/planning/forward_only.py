"""Forward-only plans: parameters stream through the device, one block ahead of compute if the budget allows."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from ..capture.model import Traced, trace_model
from ..lowering.bind import bind
from ..lowering.inductor import compiled
from ..lowering.options import BlockClass, ClassOption
from ..lowering.problem import Lowered, Lowering
from ..machines.devices import EMULATED, accelerator
from ..plans.plan import Plan
from ..profile.figures import measure
from ..programs.prelude import lower_prelude
from ..programs.programs import ClassGraph
from ..progress import Progress
from ..solver.scheduling.forward_only import stream_schedule
from .refusal import stream_refusal
from .request import Prepared, Request
from .subject import fixed_bytes, host_fixed_bytes


def make_stream(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request, say: Progress
) -> Prepared:
    """Plan a forward without backward.

    Parameters
    ----------
    model: plain, in the mode in which it will run. args, kwargs: one real batch.

    Raises: CaptureError; InfeasibleBudget if some block does not fit.
    """
    start = time.perf_counter()
    traced = trace_model(
        model, args, kwargs, request.config, gradients=False, say=say, device=accelerator(request.device)
    )
    lowered, fixed = _lowered(model, args, kwargs, traced, request, say)
    schedule, needed = stream_schedule(lowered.problem)
    if schedule is None:
        raise stream_refusal(lowered.problem, request, needed + fixed)
    plan = Plan(
        fingerprint="",
        schedule=schedule,
        classes={},
        blocks=(),
        budget_bytes=request.budget_bytes,
        fixed_bytes=fixed,
        least_budget_bytes=needed + fixed,
        lower_bound_s=0.0,
        gap=0.0,
        status="streamed forward",
        user_bytes=0,
        plan_s=time.perf_counter() - start,
        allocator_bytes=request.margin_bytes,
    )
    if request.config.backend == "inductor":
        lowered = compiled(lowered, schedule, request.device, say)
    return Prepared(traced.captured, plan, bind(traced.captured, lowered, schedule.options), {})


def _lowered(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: Traced,
    request: Request,
    say: Progress,
) -> tuple[Lowered, int]:
    """Measure a captured forward and state it as a problem; also return the bytes that no plan can move."""
    rates, costs = measure(model, args, kwargs, traced, say, request.device)
    classes = {}
    for block in traced.blocks:
        graph = ClassGraph(block.joint, costs[block.key])
        only = ClassOption("forward", graph.programs(frozenset()), frozenset(), frozenset())
        classes[block.key] = BlockClass(graph, (only,))
    prelude = lower_prelude(traced.captured, traced.chain, traced.blocks, costs.get("", {}))
    fixed = fixed_bytes(model, traced.captured, {}) + request.margin_bytes
    lowering = Lowering(traced.captured, traced.chain, traced.blocks, classes, prelude, {}, {}, request.files)
    lowered = lowering.problem(
        rates,
        shared_cores=request.device == EMULATED,
        device_budget_bytes=max(1, request.budget_bytes - fixed),
        host_budget_bytes=request.host_budget_bytes,
        turn_around_steps=2,
    )
    held = host_fixed_bytes(model, traced.captured, lowered.problem, request.files)
    return replace(lowered, problem=replace(lowered.problem, host_fixed_bytes=held)), fixed
