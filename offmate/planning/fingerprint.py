"""Hashes that identify plans and measurements."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import replace
from typing import Any

import torch

from ..capture.captured import Captured
from ..capture.model import Traced, structure
from ..config import Config
from ..guards.surroundings import kernel_settings
from ..machines.allocator import allocator_words
from ..machines.devices import EMULATED, accelerator, words
from ..machines.hardware import Hardware
from ..optim.identity import identity_of
from ..optim.updater import Updater
from ..plans.orders import way
from ..plans.plan import Plan
from ..sizes import format_bytes
from ..split import Split
from ..version import VERSION
from .request import Request


def fingerprint_of(
    model: torch.nn.Module,
    traced: Traced,
    request: Request,
    updater: Updater | None,
    machine: Hardware | None,
    budgets: bool = True,
) -> str:
    """Hash everything that the plan depends on, or, without `budgets`, everything that measuring depends on."""
    captured = traced.captured
    wiring = [(b.key, [e.node.name for e in b.spec.externals], [n.name for n in b.spec.results]) for b in traced.blocks]
    optimizer = identity_of(updater) if updater is not None else None
    parts: tuple[Any, ...] = (
        VERSION, torch.__version__, platform.processor(), torch.get_num_threads(), *_of_device(request, machine),
        wiring, structure(traced), [node.format_node() for node in traced.chain.prelude], _batch(captured),
        sorted(captured.params.items()), sorted(traced.differentiated), captured.outputs, optimizer,
        request.config.options_per_block, machine,
    )  # fmt: skip
    if budgets:
        host = None if request.automatic_host else request.host_budget_bytes
        parts += (request.budget_bytes, host, request.user_bytes, _planning(request.config))
        parts += (request.micro_batches, request.clips, *(("scales",) if request.scales else ()))
        parts += ("together", request.per_step) if request.per_step > 1 else ()
        parts += ("last", request.last_per_step) if request.last_per_step else ()
        parts += ("measures",) if request.measures else ()
        parts += ("spare", request.spare_bytes) if request.spare_bytes else ()
        if request.files is not None:  # a rate that was measured here is a figure like those of links
            rate = request.files.read_bytes_per_s if machine is not None else None
            parts += (sorted(request.files.names), rate, request.files.buffers_bytes)
        if request.storage is not None:
            parts += (request.storage if machine is not None else "storage",)
            parts += ("parameters in files",) if request.storage.for_parameters else ()
            parts += ("host updates from files",)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _batch(captured: Captured) -> list[tuple[Any, ...]]:
    """List the layouts of the inputs; blocks' keys do not include inputs that no block reads."""
    values = (node.meta["fake"] for node in captured.graph.nodes if node.name in captured.inputs)
    return [(tuple(v.shape), tuple(v.stride()), v.dtype) for v in values if isinstance(v, torch.Tensor)]


def differences(plan: Plan, request: Request, planned: bool) -> list[str]:
    """List the known differences between a plan and a request, as text.

    Parameters
    ----------
    planned: whether an optimizer's updates are planned.
    """
    there, updates = plan.schedule, request.config.updates
    found = []
    if plan.problem is not None and plan.problem.rates.shared_cores != (request.device == EMULATED):
        found.append(f"plan for another machine (hardware=), now for {request.device}")
    if plan.problem is not None and (plan.problem.update == "planned") != planned:
        found.append("plan without optimizer=, now with" if planned else "plan with optimizer=, now without")
    steps, now = there.per_update, request.per_update
    if steps != now:
        found.append(f"accumulation_steps={steps} in the plan, {now} now")
    elif there.per_step != request.per_step:
        ways = way(there.per_step, steps), way(request.per_step, now)
        found.append("micro-batches {} in the plan, {} now".format(*ways))
    looks = there.gate and (there.micro_batches == 1 or (plan.problem is not None and plan.problem.gate_s > 0))
    if looks != (request.clips or request.scales):
        found.append(f"plan {_with(looks)} max_grad_norm= or grad_scaler=, now {_with(not looks)}")
    if plan.problem is not None and plan.problem.speculates != request.speculates:
        found.append(f"plan {_with(plan.problem.speculates)} Config(speculate=True), now {_with(request.speculates)}")
    if plan.low and not request.config.low_copies:
        found.append("plan with copies of parameters in a lower precision, now Config(low_copies=False)")
    if plan.budget_bytes != request.budget_bytes:
        found.append(f"budget {format_bytes(plan.budget_bytes)} in the plan, {format_bytes(request.budget_bytes)} now")
    if any(plan.stored_bytes) and request.storage is None:
        found.append("plan with states or activations in files, now without storage=")
    sides = {"host": plan.split.device, "device": plan.split.host}
    agrees = updates.agrees(plan.split) if isinstance(updates, Split) else not sides.get(updates)
    if not agrees:
        found.append("the plan updates parameters on a different side than Config(updates=) requires")
    return found


def _with(given: bool) -> str:
    return "with" if given else "without"


def _of_device(request: Request, machine: Hardware | None) -> tuple[Any, ...]:
    """Return the device, and here also what decides which kernels run on it and how its memory is cut."""
    if machine is not None:
        return (request.device,)
    where = accelerator(request.device)
    if where is None:
        return request.device, kernel_settings()
    return words(where), kernel_settings(), allocator_words(where)


def _planning(config: Config) -> Config:
    """Return a configuration with all fields that do not affect a plan set to fixed values."""
    # Of the last four, the request says what follows from them.
    return replace(
        config, cache_dir=None, shape_buckets=(), max_plans=1, backend="eager", accumulation_order="auto",
        micro_batches_per_pass=None, measure_grad_norm=False, speculate=config.speculate is True,
    )  # fmt: skip
