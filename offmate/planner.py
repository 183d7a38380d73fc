"""The road from a model and a batch to a plan bound to tensors. Only this file knows all the phases."""

from __future__ import annotations

import hashlib
import logging
import math
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .bind import bind
from .blocks import TracedBlock
from .capture import Captured
from .config import Config
from .describe import block_rows, refusal
from .devices import accelerator, words
from .errors import InfeasibleBudget, PlanFileError
from .fake import fake_batch, faked, stand_in
from .figures import measure, measure_all, work_out
from .hardware import Hardware
from .inductor import compiled
from .joint import dense_stride
from .lower import BlockClass, ClassOption, LinkRates, Lowered, Lowering, Trainable, lower_prelude
from .measured import recall, remember
from .optimizer import UpdateCost, Updater
from .plans import Plan, StoredClass, StoredOption, load_plan
from .programs import ClassGraph, NodeCost
from .progress import Progress
from .runtime.binding import Binding
from .sizes import format_bytes
from .solver.follow import follow
from .solver.plan import plan as solve_problem
from .solver.solve import least_budget
from .traced import Traced, structure, trace_model

log = logging.getLogger("offmate")

_USER_COPIES = 3  # of an output that the user differentiates: its gradient, and what a loss keeps and makes


@dataclass(frozen=True)
class Request:
    """What a plan is for, besides the model and the batch.

    Parameters
    ----------
    budget_bytes, host_budget_bytes: of device and host.
    device: kind of device. user_bytes: reserved for the user's code; None estimates it, as `user_factor` times what
        usual losses hold.
    automatic_host: the host budget is what is available now; a stored plan need only fit into it.
    micro_batches: how many forwards and backwards make one planned update. clips: whether gradients are clipped.
    margin_bytes: of the budget, left to the device's allocator.
    """

    budget_bytes: int
    host_budget_bytes: int
    device: str
    config: Config
    user_bytes: int | None = None
    user_factor: float = 1.0
    automatic_host: bool = False
    micro_batches: int = 1
    clips: bool = False
    margin_bytes: int = 0

    @property
    def gate(self) -> bool:
        """Whether updates wait until all gradients are complete."""
        return self.clips or self.micro_batches > 1


@dataclass(frozen=True)
class Prepared:
    """A captured model with its plan, ready to be replayed.

    Parameters
    ----------
    gradient_like: per output into which the user hands a gradient, a meta tensor laid out as that gradient.
    keys: class of every block. structure: of the traced model, sizes left out; "" if nobody may follow.
    """

    captured: Captured
    plan: Plan
    binding: Binding
    gradient_like: dict[str, torch.Tensor]
    keys: tuple[str, ...] = ()
    structure: str = ""


def make_plan(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    updater: Updater | None,
    say: Progress = lambda phase, share: None,
    given: Plan | None = None,
    machine: Hardware | None = None,
    real: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    near: tuple[Prepared, ...] = (),
    kept: Mapping[str, Plan] | None = None,
) -> Prepared:
    """Plan one training iteration of a model for batches like this one.

    Parameters
    ----------
    model: plain, in the mode in which it will run. args, kwargs: one real batch.
    updater: the optimizer, None if the user's code updates.
    say: told of progress. given: a plan to use instead of searching for one.
    machine: rates of a machine that is not here; nothing is measured then, and model and batch may be fake.
    real: the batch to take data-dependent decisions on, where the given one is fake.
    near: plans for larger batches of the same kind; the decisions of the first one that can be are taken over.
    kept: plans of an earlier run by fingerprint, used where one fits.

    Returns: the plan, bound to the model's tensors.
    Raises: CaptureError, InfeasibleBudget, PlanFileError.
    """
    start = time.perf_counter()
    where = accelerator(request.device) if machine is None else None
    traced = trace_model(model, args, kwargs, request.config, True, say, real, where)
    request = replace(request, user_bytes=_user_bytes(traced, request))
    fingerprint = _fingerprint(model, traced, request, updater, machine)
    if given is not None and given.fingerprint != fingerprint:
        raise PlanFileError(
            f"the plan was made for another model, batch, optimizer or budget (fingerprint {given.fingerprint}, "
            f"here {fingerprint}); plan again with offmate.plan"
        )
    margin = f"-{request.margin_bytes}" if request.margin_bytes else ""
    path = Path(request.config.cache_dir, f"{fingerprint}{margin}.json") if request.config.cache_dir else None
    stored = given or _fitting((kept or {}).get(fingerprint), request) or _cached(path, request)
    if stored is not None:
        lowered = _relower(model, traced, request, updater, stored)
        elapsed = time.perf_counter() - start
        plan = stored if given is not None else replace(stored, plan_s=elapsed, from_cache=True)
    elif followed := _follow(model, args, kwargs, traced, request, updater, near, say):
        plan, lowered = followed
        plan = replace(plan, fingerprint=fingerprint, plan_s=time.perf_counter() - start)
    else:
        plan, lowered = _search(model, args, kwargs, traced, request, updater, fingerprint, say, start, machine)
        if path is not None:
            plan.save(path)
    if request.config.backend == "inductor":
        lowered = compiled(lowered, plan.schedule, request.device, say)
    binding = bind(traced.captured, lowered, plan.schedule.options)
    keys = tuple(b.key for b in traced.blocks)
    return Prepared(traced.captured, plan, binding, _gradient_like(traced), keys, structure(traced))


def plan_elsewhere(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    updater: Updater | None,
    machine: Hardware,
    say: Progress = lambda phase, share: None,
) -> Plan:
    """Plan for a machine that is not here; parameters and batch may be on the meta device.

    Attention is planned as a card's fused kernel keeps it (see `offmate.fake`); seconds follow from the rates.

    Returns: the plan. Raises: CaptureError, InfeasibleBudget.
    """
    real = stand_in((args, kwargs))
    with faked(model) as mode:
        args, kwargs = fake_batch(mode, (args, kwargs))
        return make_plan(model, args, kwargs, request, updater, say, machine=machine, real=real).plan


def _cached(path: Path | None, request: Request) -> Plan | None:
    if path is None or not path.exists():
        return None
    try:
        plan = load_plan(path)
    except PlanFileError as error:
        log.warning("a cached plan is ignored: %s", error)
        return None
    return _fitting(plan, request)


def _fitting(plan: Plan | None, request: Request) -> Plan | None:
    if plan is not None and plan.host_bytes > request.host_budget_bytes:
        log.info("an earlier plan needs %s of host memory, more than there is now", format_bytes(plan.host_bytes))
        return None
    return plan


def _gradient_like(traced: Traced) -> dict[str, torch.Tensor]:
    found = {}
    for node in traced.chain.made_in:
        if node.name in traced.differentiated:
            fake = traced.chain.facts[node].value
            found[node.name] = torch.empty_strided(fake.shape, dense_stride(fake), dtype=fake.dtype, device="meta")
    return found


def _user_bytes(traced: Traced, request: Request) -> int:
    if request.user_bytes is not None:
        return request.user_bytes
    sizes = [
        traced.chain.facts[n].value.numel() * traced.chain.facts[n].value.element_size()
        for n in traced.chain.made_in
        if n.name in traced.differentiated
    ]
    return sum(size if size <= 16 else math.ceil(request.user_factor * _USER_COPIES * size) for size in sizes)


def _follow(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: Traced,
    request: Request,
    updater: Updater | None,
    near: tuple[Prepared, ...],
    say: Progress,
) -> tuple[Plan, Lowered] | None:
    """Take over the decisions of a larger batch's plan: bytes and seconds are measured anew, nothing is solved."""
    own = structure(traced) if near else ""
    for known in near:
        taken = {b.key: key for b, key in zip(traced.blocks, known.keys)}
        if known.structure != own or any(taken[b.key] != key for b, key in zip(traced.blocks, known.keys)):
            continue
        _, costs = measure(model, args, kwargs, traced, say, request.device)
        options = {key: known.plan.classes[old].options for key, old in taken.items()}
        classes = {b.key: restore_class(b, options[b.key], costs[b.key]) for b in traced.blocks}
        unknown = LinkRates(1.0, 1.0, 1.0)
        lowered, held = _lower(model, traced, request, updater, classes, costs[""], {}, unknown)
        unchanged = known.plan.fixed_bytes - known.plan.allocator_bytes
        fixed = held + unchanged - fixed_bytes(model, known.captured, {})
        problem = replace(lowered.problem, device_budget_bytes=max(0, request.budget_bytes - fixed))
        schedule = follow(known.plan.schedule, problem)
        if schedule is None:
            continue
        plan = replace(
            known.plan,
            schedule=schedule,
            classes={key: StoredClass(o, _kernel_bytes(costs[key])) for key, o in options.items()}
            | {"": StoredClass((), _kernel_bytes(costs[""]))},
            blocks=block_rows(lowered, schedule),
            budget_bytes=request.budget_bytes,
            fixed_bytes=fixed,
            allocator_bytes=request.margin_bytes,
            lower_bound_s=0.0,
            gap=0.0,
            status="takes the decisions of a larger batch's plan",
            user_bytes=request.user_bytes or 0,
            from_cache=False,
        )
        return plan, lowered
    return None


def _search(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: Traced,
    request: Request,
    updater: Updater | None,
    fingerprint: str,
    say: Progress,
    start: float,
    machine: Hardware | None,
) -> tuple[Plan, Lowered]:
    """Measure, solve the options, state and solve the problem."""
    config = request.config
    own = _fingerprint(model, traced, request, updater, machine, budgets=False)
    measured = recall(own, config.cache_dir)
    if measured is None:
        if machine is None:
            measured = measure_all(model, args, kwargs, traced, config.options_per_block, updater, say, request.device)
        else:
            measured = work_out(model, traced, machine, config.options_per_block, updater, say)
        remember(own, config.cache_dir, measured)
    classes = {b.key: restore_class(b, measured.options[b.key], measured.costs[b.key]) for b in traced.blocks}
    say("solve", 0.0)
    before = measured.costs.get("", {})
    lowered, fixed = _lower(model, traced, request, updater, classes, before, measured.updates, measured.rates)
    problem = lowered.problem
    found = solve_problem(
        problem, time_limit_s=config.solver_time_limit_s, gap=config.solver_gap, backend=config.solver
    )
    if found.schedule is None:
        raise refusal(lowered, request.budget_bytes, request.host_budget_bytes, fixed, config)
    say(f"least budget (this plan is within {found.solution.gap:.1%} of the bound)", 0.0)
    least = least_budget(problem, time_limit_s=config.solver_time_limit_s, backend=config.solver)
    plan = Plan(
        fingerprint=fingerprint,
        schedule=found.schedule,
        classes={key: StoredClass(o, _kernel_bytes(measured.costs[key])) for key, o in measured.options.items()}
        | {"": StoredClass((), _kernel_bytes(before))},
        blocks=block_rows(lowered, found.schedule),
        budget_bytes=request.budget_bytes,
        fixed_bytes=fixed,
        least_budget_bytes=least.bytes + fixed,
        lower_bound_s=found.solution.lower_bound_s,
        gap=found.solution.gap,
        status=found.solution.status.value,
        user_bytes=request.user_bytes or 0,
        plan_s=time.perf_counter() - start,
        problem=problem,
        allocator_bytes=request.margin_bytes,
    )
    return plan, lowered


def _lower(
    model: torch.nn.Module,
    traced: Traced,
    request: Request,
    updater: Updater | None,
    classes: dict[str, BlockClass],
    prelude_costs: dict[str, NodeCost],
    updates: dict[str, UpdateCost],
    rates: LinkRates,
) -> tuple[Lowered, int]:
    """The problem, and the bytes on the device that no decision changes."""
    captured = traced.captured
    prelude = lower_prelude(captured, traced.chain, traced.blocks, prelude_costs)
    fixed = fixed_bytes(model, captured, updates) + request.margin_bytes
    if request.budget_bytes <= fixed:
        raise InfeasibleBudget(
            f"a budget of {format_bytes(request.budget_bytes)} does not hold the model's buffers and the optimizer's "
            f"scalars, {format_bytes(fixed)}; raise gpu_budget",
            budget_bytes=request.budget_bytes,
        )
    trainable = {
        n: Trainable(c.state_bytes, c.cpu_update_s, c.device_update_s, c.cpu_add_s, c.device_add_s)
        for n, c in updates.items()
    }
    lowering = Lowering(captured, traced.chain, traced.blocks, classes, prelude, traced.differentiated, trainable)
    lowered = lowering.problem(
        rates,
        shared_cores=request.device == "emulated",
        device_budget_bytes=request.budget_bytes - fixed,
        host_budget_bytes=request.host_budget_bytes,
        update="planned" if updater is not None else "external",
        user_bytes=request.user_bytes or 0,
        turn_around_steps=max(request.config.turn_around_steps, 3 if request.gate else 2),
        gate=request.gate,
        micro_batches=request.micro_batches,
        gate_s=sum(c.norm_s for c in updates.values()) if request.clips else 0.0,
    )
    return lowered, fixed


def fixed_bytes(model: torch.nn.Module, captured: Captured, updates: dict[str, UpdateCost]) -> int:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors = [buffers[name] for name in captured.buffers.values()] + list(captured.constants.values())
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) + sum(c.scalar_bytes for c in updates.values())


def _relower(model: torch.nn.Module, traced: Traced, request: Request, updater: Updater | None, plan: Plan) -> Lowered:
    """Rebuild the programs of a stored plan; no times are needed, only what the ledger counts."""
    stored = {
        key: (c.options, {n: NodeCost(0.0, work, tuple(held)) for n, (work, *held) in c.kernel_bytes.items()})
        for key, c in plan.classes.items()
    }
    classes = {b.key: restore_class(b, *stored[b.key]) for b in traced.blocks}
    unknown = LinkRates(1.0, 1.0, 1.0)
    request = replace(request, budget_bytes=plan.budget_bytes)
    return _lower(model, traced, request, updater, classes, stored[""][1], {}, unknown)[0]


def restore_class(block: TracedBlock, options: tuple[StoredOption, ...], costs: dict[str, NodeCost]) -> BlockClass:
    """A class with the programs of its options, from what is stored of them."""
    graph = ClassGraph(block.joint, costs)
    own = frozenset(s for n in block.joint.forward for s in graph.made_by(n)) - graph.resting
    restored = []
    for option in options:
        kept, offloaded = frozenset(option.kept), frozenset(option.offloaded)
        restored.append(ClassOption(option.name, graph.programs(own - kept - offloaded), kept, offloaded))
    return BlockClass(graph, tuple(restored))


def _kernel_bytes(costs: dict[str, NodeCost]) -> dict[str, tuple[int, ...]]:
    found = {name: (c.workspace_bytes, *c.storage_bytes) for name, c in costs.items()}
    return {name: sizes for name, sizes in found.items() if any(sizes)}


def _fingerprint(
    model: torch.nn.Module,
    traced: Traced,
    request: Request,
    updater: Updater | None,
    machine: Hardware | None,
    budgets: bool = True,
) -> str:
    """A hash of everything that the plan depends on, or without `budgets` of what measuring depends on."""
    captured = traced.captured
    wiring = [(b.key, [e.node.name for e in b.spec.externals], [n.name for n in b.spec.results]) for b in traced.blocks]
    optimizer: Any = None
    if updater is not None:
        kept = ("lr", "weight_decay")
        hyper = {n: sorted((k, str(v)) for k, v in g.items() if k not in kept) for n, g in updater.groups.items()}
        optimizer = (updater.base.__qualname__, hyper)
    parts: tuple[Any, ...] = (
        __version__, torch.__version__, platform.processor(), torch.get_num_threads(), _device_words(request, machine),
        wiring,
        sorted(captured.params.items()), sorted(traced.differentiated), captured.outputs, optimizer,
        request.config.options_per_block, machine,
    )  # fmt: skip
    if budgets:
        host = None if request.automatic_host else request.host_budget_bytes
        parts += (request.budget_bytes, host, request.user_bytes, _planning(request.config))
        parts += (request.micro_batches, request.clips)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _device_words(request: Request, machine: Hardware | None) -> str:
    where = accelerator(request.device) if machine is None else None
    return request.device if where is None else words(where)


def _planning(config: Config) -> Config:
    """What of a configuration decides a plan."""
    return replace(config, cache_dir=None, shape_buckets=(), max_plans=1, backend="eager")
