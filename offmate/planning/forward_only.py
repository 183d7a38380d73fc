"""Forward-only plans: parameters stream through the device, one block ahead of compute if the budget allows."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..capture.model import trace_model
from ..errors import InfeasibleBudget
from ..lowering.bind import bind
from ..lowering.inductor import compiled
from ..lowering.options import BlockClass, ClassOption
from ..lowering.problem import Lowering
from ..machines.devices import EMULATED, accelerator
from ..machines.links import LinkRates
from ..plans.plan import Plan
from ..profile.figures import measure
from ..programs.prelude import lower_prelude
from ..programs.programs import ClassGraph
from ..progress import Progress
from ..sizes import format_bytes, format_least_bytes
from ..solver.scheduling.forward_only import stream_schedule
from .request import Prepared, Request
from .subject import fixed_bytes


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
    rates, costs = measure(model, args, kwargs, traced, say, request.device)
    classes = {}
    for block in traced.blocks:
        graph = ClassGraph(block.joint, costs[block.key])
        only = ClassOption("forward", graph.programs(frozenset()), frozenset(), frozenset())
        classes[block.key] = BlockClass(graph, (only,))
    prelude = lower_prelude(traced.captured, traced.chain, traced.blocks, costs.get("", {}))
    fixed = fixed_bytes(model, traced.captured, {}) + request.margin_bytes
    lowering = Lowering(traced.captured, traced.chain, traced.blocks, classes, prelude, frozenset(), {})
    lowered = lowering.problem(
        LinkRates(rates.in_bytes_per_s, rates.out_bytes_per_s, rates.both_bytes_per_s),
        shared_cores=request.device == EMULATED,
        device_budget_bytes=max(1, request.budget_bytes - fixed),
        host_budget_bytes=request.host_budget_bytes,
        turn_around_steps=2,
    )
    schedule, needed = stream_schedule(lowered.problem)
    streamed = sum(group.param_bytes for group in lowered.problem.groups)
    if schedule is None and streamed > request.host_budget_bytes:
        raise InfeasibleBudget(
            f"a forward without gradients streams {format_bytes(streamed)} of parameters from the host, and cpu_budget "
            f"is {format_bytes(request.host_budget_bytes)}; raise it to {format_least_bytes(streamed)} or more",
            budget_bytes=request.budget_bytes,
        )
    if schedule is None:
        raise InfeasibleBudget(
            f"a budget of {format_bytes(request.budget_bytes)} cannot hold one block of the forward; the least budget "
            f"that works is {format_least_bytes(needed + fixed)}. Raise gpu_budget or make the batch smaller",
            budget_bytes=request.budget_bytes,
            least_budget_bytes=needed + fixed,
        )
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
