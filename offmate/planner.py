"""The road from a model and a batch to a plan bound to tensors. Only this file knows all the phases."""

from __future__ import annotations

import hashlib
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import __version__
from .bind import bind
from .blocks import TracedBlock, trace_blocks
from .capture import Captured, capture
from .config import Config
from .errors import CaptureError, InfeasibleBudget, OffmateError, PlanFileError
from .joint import dense_stride
from .lower import BlockClass, ClassOption, LinkRates, Lowered, Lowering, Trainable, class_options, lower_prelude
from .measured import Measured, recall, remember
from .optimizer import UpdateCost, Updater
from .partition import Chain, partition
from .plan import BlockRow, Plan, StoredClass, StoredOption, load_plan
from .profile import measure_link, profile_classes, profile_prelude
from .programs import ClassGraph, NodeCost
from .runtime.binding import Binding
from .runtime.emulated import EmulatedDevice
from .sizes import format_bytes, format_least_bytes
from .solver.plan import plan as solve_problem
from .solver.schedule import Kind, Schedule
from .solver.solve import least_budget, least_host

log = logging.getLogger("offmate")

Progress = Callable[[str, float], None]
"""Told the phase and how much of it is done, from 0 to 1."""

_USER_COPIES = 3  # of an output that the user differentiates: its gradient, and what a loss keeps and makes


@dataclass(frozen=True)
class Request:
    """What a plan is for, besides the model and the batch.

    Parameters
    ----------
    budget_bytes, host_budget_bytes: of device and host.
    device: kind of device. user_bytes: reserved for the user's code; None estimates it.
    automatic_host: the host budget is what is available now; a stored plan need only fit into it.
    """

    budget_bytes: int
    host_budget_bytes: int
    device: str
    config: Config
    user_bytes: int | None = None
    automatic_host: bool = False


@dataclass(frozen=True)
class Prepared:
    """A captured model with its plan, ready to be replayed.

    Parameters
    ----------
    gradient_like: per output into which the user hands a gradient, a meta tensor laid out as that gradient.
    """

    captured: Captured
    plan: Plan
    binding: Binding
    gradient_like: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Traced:
    """A captured model cut into traced blocks, before any number is known."""

    captured: Captured
    chain: Chain
    blocks: tuple[TracedBlock, ...]
    differentiated: frozenset[str]


def trace_model(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: Config,
    gradients: bool,
    say: Progress,
) -> Traced:
    """Capture a model and trace its block classes.

    Parameters
    ----------
    gradients: whether a backward is wanted.
    """
    say("capture", 0.0)
    captured = select_outputs(capture(model, args, kwargs), config)
    for warning in captured.warnings:
        log.warning(warning)
    params = dict(model.named_parameters(remove_duplicate=False))
    trainable = frozenset(n for n, name in captured.params.items() if gradients and params[name].requires_grad)
    say("blocks", 0.0)
    chain = partition(captured, trainable)
    differentiated = choose_differentiated(captured, chain, config) if trainable else frozenset()
    blocks = trace_blocks(captured, chain, trainable, differentiated, lambda done, total: say("blocks", done / total))
    return Traced(captured, chain, blocks, differentiated)


def select_outputs(captured: Captured, config: Config) -> Captured:
    """Leave out the outputs that the configuration does not keep."""
    if config.outputs == "all":
        return captured
    absent = set(config.outputs) - set(captured.output_names)
    if absent:
        raise CaptureError(
            f"outputs names {', '.join(sorted(absent))}, but the model returns {', '.join(captured.output_names)}"
        )
    kept = tuple(
        o if name in config.outputs or not isinstance(o, str) else (None,)
        for o, name in zip(captured.outputs, captured.output_names)
    )
    return replace(captured, outputs=kept)


def choose_differentiated(captured: Captured, chain: Chain, config: Config) -> frozenset[str]:
    """Names of the output nodes into which backward() will hand a gradient."""
    able = {}
    for output, name in zip(captured.outputs, captured.output_names):
        node = next((n for n in chain.made_in if n.name == output), None)
        if node is not None and chain.facts[node].requires_grad[0]:
            able[name] = node
    if config.gradients_into != "auto":
        absent = set(config.gradients_into) - set(able)
        if absent:
            raise CaptureError(
                f"gradients_into names {', '.join(sorted(absent))}; outputs that can have a gradient: {', '.join(able)}"
            )
        return frozenset(able[name].name for name in config.gradients_into)
    if not able:
        raise CaptureError("no output of the model depends on a trainable parameter; there is nothing to train")
    scalars = [n.name for n in able.values() if chain.facts[n].value.dim() == 0]
    return frozenset(scalars[:1] or [n.name for n in able.values()])


def make_plan(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    updater: Updater | None,
    say: Progress = lambda phase, share: None,
    given: Plan | None = None,
) -> Prepared:
    """Plan one training iteration of a model for batches like this one.

    Parameters
    ----------
    model: plain, in the mode in which it will run. args, kwargs: one real batch.
    updater: the optimizer, None if the user's code updates.
    say: told of progress. given: a plan to use instead of searching for one.

    Returns: the plan, bound to the model's tensors.
    Raises: CaptureError, InfeasibleBudget, PlanFileError.
    """
    start = time.perf_counter()
    traced = trace_model(model, args, kwargs, request.config, gradients=True, say=say)
    request = replace(request, user_bytes=_user_bytes(traced, request.user_bytes))
    fingerprint = _fingerprint(model, traced, request, updater)
    if given is not None and given.fingerprint != fingerprint:
        raise PlanFileError(
            f"the plan was made for another model, batch, optimizer or budget (fingerprint {given.fingerprint}, "
            f"here {fingerprint}); plan again with offmate.plan"
        )
    path = Path(request.config.cache_dir, f"{fingerprint}.json") if request.config.cache_dir else None
    stored = given or _cached(path, request)
    if stored is not None:
        lowered = _relower(model, traced, request, updater, stored)
        elapsed = time.perf_counter() - start
        plan = stored if given is not None else replace(stored, plan_s=elapsed, from_cache=True)
    else:
        plan, lowered = _search(model, args, kwargs, traced, request, updater, fingerprint, say, start)
        if path is not None:
            plan.save(path)
    binding = bind(traced.captured, lowered, plan.schedule.options)
    return Prepared(traced.captured, plan, binding, _gradient_like(traced))


def _cached(path: Path | None, request: Request) -> Plan | None:
    if path is None or not path.exists():
        return None
    try:
        plan = load_plan(path)
    except PlanFileError as error:
        log.warning("a cached plan is ignored: %s", error)
        return None
    if plan.host_bytes > request.host_budget_bytes:
        log.info("a cached plan needs %s of host memory, more than there is now", format_bytes(plan.host_bytes))
        return None
    return plan


def _gradient_like(traced: Traced) -> dict[str, torch.Tensor]:
    found = {}
    for node in traced.chain.made_in:
        if node.name in traced.differentiated:
            fake = traced.chain.facts[node].value
            found[node.name] = torch.empty_strided(fake.shape, dense_stride(fake), dtype=fake.dtype, device="meta")
    return found


def _user_bytes(traced: Traced, given: int | None) -> int:
    if given is not None:
        return given
    sizes = [
        traced.chain.facts[n].value.numel() * traced.chain.facts[n].value.element_size()
        for n in traced.chain.made_in
        if n.name in traced.differentiated
    ]
    return sum(size if size <= 16 else _USER_COPIES * size for size in sizes)


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
) -> tuple[Plan, Lowered]:
    """Measure, solve the options, state and solve the problem."""
    config = request.config
    own = _fingerprint(model, traced, request, updater, budgets=False)
    measured = recall(own, config.cache_dir)
    if measured is None:
        measured = _measured(model, args, kwargs, traced, request, updater, say)
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
        raise _infeasible(lowered, request, fixed)
    say("least budget", 0.0)
    least = least_budget(problem, time_limit_s=config.solver_time_limit_s, backend=config.solver)
    plan = Plan(
        fingerprint=fingerprint,
        schedule=found.schedule,
        classes={key: StoredClass(o, _workspaces(measured.costs[key])) for key, o in measured.options.items()}
        | {"": StoredClass((), _workspaces(before))},
        blocks=_rows(lowered, found.schedule),
        budget_bytes=request.budget_bytes,
        fixed_bytes=fixed,
        least_budget_bytes=least.bytes + fixed,
        lower_bound_s=found.solution.lower_bound_s,
        gap=found.solution.gap,
        status=found.solution.status.value,
        user_bytes=request.user_bytes or 0,
        plan_s=time.perf_counter() - start,
    )
    return plan, lowered


def _measured(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: Traced,
    request: Request,
    updater: Updater | None,
    say: Progress,
) -> Measured:
    """Time classes, links and updates, and solve the options of every class."""
    say("profile", 0.0)
    rates, costs = measure(model, args, kwargs, traced, say)
    joints = {b.key: b.joint for b in traced.blocks}
    last = traced.blocks[-1].key
    options = {}
    for done, (key, joint) in enumerate(joints.items()):
        say("options", done / len(joints))
        found = class_options(joint, costs[key], rates.out_bytes_per_s, request.config.options_per_block, key == last)
        options[key] = tuple(
            StoredOption(o.name, tuple(sorted(o.kept)), tuple(sorted(o.offloaded))) for o in found.options
        )
    return Measured(rates, costs, _update_costs(model, updater), options)


def measure(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], traced: Traced, say: Progress
) -> tuple[LinkRates, dict[str, dict[str, NodeCost]]]:
    """Time every class on real data, and the links."""
    params = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    captured = traced.captured
    tensors = {n: params[name] for n, name in captured.params.items()}
    tensors |= {n: buffers[name] for n, name in captured.buffers.items()}
    tensors |= captured.constants
    leaves = pytree.tree_leaves((args, kwargs))
    tensors |= {name: leaf for name, leaf in zip(captured.inputs, leaves) if name is not None}
    prelude = lower_prelude(captured, traced.chain, traced.blocks)
    with torch.no_grad(), torch._C._DisableAutocast(), torch.random.fork_rng(devices=[]):
        shared, prelude_costs = profile_prelude(prelude, tensors)
        nodes = {n.name: n for n in captured.graph.nodes}
        given = {nodes[name]: tensor for name, tensor in tensors.items()} | shared
        costs = profile_classes(traced.blocks, given.__getitem__, lambda done, total: say("profile", done / total))
    device = EmulatedDevice(2**62)
    try:
        rates = measure_link(device)
    finally:
        device.close()
    return rates, costs | {"": prelude_costs}


def _update_costs(model: torch.nn.Module, updater: Updater | None) -> dict[str, UpdateCost]:
    """What updating each trainable parameter takes, measured once per shape and group."""
    if updater is None:
        return {}
    measured: dict[tuple[Any, ...], UpdateCost] = {}
    found = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        hyper = updater.groups[name]
        key = (tuple(param.shape), param.dtype, id(hyper))
        if key not in measured:
            measured[key] = updater.cost(param, hyper)
        found[name] = measured[key]
    return found


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
    fixed = fixed_bytes(model, captured, updates)
    if request.budget_bytes <= fixed:
        raise InfeasibleBudget(
            f"a budget of {format_bytes(request.budget_bytes)} does not hold the model's buffers and the optimizer's "
            f"scalars, {format_bytes(fixed)}; raise gpu_budget",
            budget_bytes=request.budget_bytes,
        )
    trainable = {n: Trainable(c.state_bytes, 2 * c.seconds, c.seconds) for n, c in updates.items()}
    lowering = Lowering(captured, traced.chain, traced.blocks, classes, prelude, traced.differentiated, trainable)
    lowered = lowering.problem(
        rates,
        shared_cores=request.device == "emulated",
        device_budget_bytes=request.budget_bytes - fixed,
        host_budget_bytes=request.host_budget_bytes,
        update="planned" if updater is not None else "external",
        user_bytes=request.user_bytes or 0,
        turn_around_steps=request.config.turn_around_steps,
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
        key: (c.options, {n: NodeCost(0.0, size) for n, size in c.workspace_bytes.items()})
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


def _workspaces(costs: dict[str, NodeCost]) -> dict[str, int]:
    return {name: c.workspace_bytes for name, c in costs.items() if c.workspace_bytes}


def _infeasible(lowered: Lowered, request: Request, fixed: int) -> OffmateError:
    """Say what does not fit, what would, and what to change."""
    config, problem = request.config, lowered.problem
    least = least_budget(problem, time_limit_s=config.solver_time_limit_s, backend=config.solver)
    if least.resource == "host":
        return InfeasibleBudget(
            f"{format_bytes(request.host_budget_bytes)} of host memory do not suffice: even an endless device would "
            f"need {format_least_bytes(least.bytes)} there. Raise cpu_budget or free host memory, raise gpu_budget so "
            "that less leaves the device, choose an optimizer with less state, or freeze a part of the model",
            budget_bytes=request.budget_bytes,
        )
    needed = least.bytes + fixed
    if needed <= request.budget_bytes:
        host = least_host(problem, time_limit_s=config.solver_time_limit_s, backend=config.solver)
        return InfeasibleBudget(
            f"no plan of whole tensors fits {format_bytes(request.budget_bytes)} on the device and "
            f"{format_bytes(request.host_budget_bytes)} on the host, though one of fractions does (it needs "
            f"{format_least_bytes(host)} of host memory); raise either budget by a few percent",
            budget_bytes=request.budget_bytes,
            least_budget_bytes=needed,
        )
    where = f"block {least.block} in step {least.step} of {problem.n_steps}"
    return InfeasibleBudget(
        f"a budget of {format_bytes(request.budget_bytes)} cannot work; the least that does is "
        f"{format_least_bytes(needed)}, where {where} binds. Raise gpu_budget to that, or make the batch or the "
        "sequence shorter, or keep fewer outputs (Config(outputs=...))",
        budget_bytes=request.budget_bytes,
        least_budget_bytes=needed,
        block=least.block,
        step=least.step,
    )


def _rows(lowered: Lowered, schedule: Schedule) -> tuple[BlockRow, ...]:
    """The plan's table: parameters count where they are first used."""
    moved = {a.name[2:] for a in schedule.actions if a.kind is Kind.PREFETCH and a.name.startswith("p:")}
    ids = {key: chr(ord("A") + i % 26) + (str(i // 26) if i >= 26 else "") for i, key in enumerate(lowered.classes)}
    first: dict[int, list[Any]] = {}
    for group in lowered.problem.groups:
        first.setdefault(group.uses[0], []).extend(group.tensors)
    rows = []
    for index, (block, chosen) in enumerate(zip(lowered.blocks, schedule.options)):
        numbers = lowered.problem.blocks[index].options[chosen]
        programs = lowered.classes[block.key].options[chosen].programs
        tensors = first.get(index, [])
        rows.append(
            BlockRow(
                name=str(index),
                class_id=ids[block.key],
                option=numbers.name,
                kept_bytes=numbers.saved_bytes,
                offloaded_bytes=numbers.offloaded_bytes,
                recomputed=programs.recomputed,
                params_bytes=sum(t.param_bytes for t in tensors),
                params_resident_bytes=sum(t.param_bytes for t in tensors if t.name not in moved),
                cpu_update_bytes=sum(t.param_bytes for t in tensors if t.name in schedule.update_cpu_s),
            )
        )
    return tuple(rows)


def _fingerprint(
    model: torch.nn.Module, traced: Traced, request: Request, updater: Updater | None, budgets: bool = True
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
        __version__, torch.__version__, platform.processor(), torch.get_num_threads(), request.device, wiring,
        sorted(captured.params.items()), sorted(traced.differentiated), captured.outputs, optimizer,
        request.config.options_per_block,
    )  # fmt: skip
    if budgets:
        host = None if request.automatic_host else request.host_budget_bytes
        parts += (request.budget_bytes, host, request.user_bytes, replace(request.config, cache_dir=None))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]
