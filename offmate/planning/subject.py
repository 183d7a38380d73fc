"""The subject of planning, and what is found out about it: its costs, and its blocks as a problem."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capture.captured import Captured
from ..capture.model import Traced, in_low_precision
from ..capture.spec import LowPrecision
from ..config import Config
from ..errors import InfeasibleBudget, PlanFileError
from ..lowering.frozen_files import FrozenFiles
from ..lowering.options import BlockClass, stored_options
from ..lowering.problem import Lowered, Lowering, Trainable
from ..lowering.state_files import StateFiles
from ..machines.devices import EMULATED, accelerator
from ..machines.hardware import Hardware
from ..machines.links import LinkRates
from ..optim.masters import has_master
from ..optim.updater import UpdateCost, Updater
from ..plans.plan import Plan
from ..profile.figures import measure_all, work_out
from ..profile.store import Measured, recall, remember
from ..programs.prelude import lower_prelude
from ..programs.programs import NodeCost
from ..progress import Progress
from ..runtime.devices.generator import Generator
from ..runtime.torch_names.tensors import storage_key
from ..sizes import format_bytes
from ..solver.fat_steps import in_passes
from ..solver.problem import Problem, update_steps
from ..solver.solve import LeastBudget, least_budget
from ..split import side_of
from .files import states_need_files, values_need_files
from .fingerprint import fingerprint_of
from .low_precision import of_plan
from .orders import drawn_bytes
from .request import Request
from .restore import restore_class

_TOLERANCE = 2e-6  # the least budget is rounded up by about as much
_VERDICT = 4  # small kernels from the last gradient to the verdict; each takes at least as long as one norm
_USER_COPIES = 3  # copies of an output that the user differentiates: its gradient, and what a loss keeps and makes


@dataclass(frozen=True)
class Subject:
    """The subject of planning: a model, traced with a batch, for a request; `machine` is another machine, or None."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    traced: Traced
    request: Request
    updater: Updater | None
    machine: Hardware | None
    say: Progress

    @property
    def generator_counts(self) -> bool:
        """Whether forwards draw from a card's generator, of which it is known how far each kernel moves it."""
        if self.machine is not None:
            return not self.machine.shared_cores
        where = accelerator(self.request.device)
        return where is not None and Generator(where).counts


def in_low(subject: Subject, low: Mapping[str, LowPrecision]) -> Subject:
    """Return the subject of which some parameters move in a lower precision."""
    return replace(subject, traced=in_low_precision(subject.traced, low))


def user_bytes_of(traced: Traced, request: Request) -> int:
    """Return the bytes reserved for the user's code between forward and backward, from the outputs' sizes if unset."""
    if request.user_bytes is not None:
        return request.user_bytes
    sizes = [
        traced.chain.facts[n].value.numel() * traced.chain.facts[n].value.element_size()
        for n in traced.chain.made_in
        if n.name in traced.differentiated
    ]
    return sum(size if size <= 16 else math.ceil(request.user_factor * _USER_COPIES * size) for size in sizes)


def costs_of(subject: Subject) -> Measured:
    """Return the costs of this model on its device, from an earlier run if nothing that they depend on has changed."""
    model, traced, request, updater, say = (
        subject.model, subject.traced, subject.request, subject.updater, subject.say,
    )  # fmt: skip
    folder = request.config.cache_dir
    own = fingerprint_of(model, traced, request, updater, subject.machine, budgets=False)
    # Figures of another machine are worked out from its rates, and do not age.
    since_s = request.config.figures_since_s if subject.machine is None else None
    measured = recall(own, folder, since_s)
    if measured is not None:
        return measured
    if subject.machine is None:
        args, kwargs = subject.args, subject.kwargs
        figures = measure_all(model, args, kwargs, traced, updater, say, request.device)
    else:
        figures = work_out(model, traced, subject.machine, updater)
    most, out_bytes_per_s = request.config.options_per_block, figures.rates.out_bytes_per_s
    options = stored_options(traced, figures.costs, out_bytes_per_s, most, say)
    measured = Measured(figures.rates, figures.costs, figures.updates, options)
    remember(own, folder, measured)
    return measured


def state(subject: Subject) -> tuple[Measured, Lowered, int]:
    """State the subject as a problem; return it with its costs and the bytes on the device that no decision changes.

    Raises: InfeasibleBudget if the budget does not even hold these bytes.
    """
    measured = costs_of(subject)
    blocks = {b.key: b for b in subject.traced.blocks}
    classes = {key: restore_class(b, measured.options[key], measured.costs[key]) for key, b in blocks.items()}
    lowered, fixed = lower(subject, classes, measured.costs.get("", {}), measured.updates, measured.rates)
    return measured, lowered, fixed


def stated_to_fit(subject: Subject) -> tuple[Measured, Lowered, int, LeastBudget]:
    """State the subject as a problem, with the least budget that works.

    Copies between storage paths and the device pass buffers in RAM. Where there is no room for these, the problem is
    the one without storage paths, if that fits or needs less. So it is where these would serve activations alone, if it
    fits.
    """
    measured, lowered, fixed = state(subject)
    subject.say("finding the least budget", 0.0)
    lowered, least = _with_least(lowered, subject.request.config)
    storage, host_bytes = subject.request.storage, subject.request.host_budget_bytes
    sizes = {name: param.nbytes for name, param in subject.model.named_parameters()}
    for_states = states_need_files(sizes, measured.updates, host_bytes)
    if storage is None or (fits(least, lowered.problem) and (for_states or not lowered.problem.value_tiers)):
        return measured, lowered, fixed, least
    _, plain, _ = state(replace(subject, request=replace(subject.request, storage=None)))
    plain, other = _with_least(plain, subject.request.config)
    needs_less = (other.resource == "host", other.bytes) < (least.resource == "host", least.bytes)
    if needs_less or (fits(other, plain.problem) and not for_states):
        return measured, plain, fixed, other
    return measured, lowered, fixed, least


def _with_least(lowered: Lowered, config: Config) -> tuple[Lowered, LeastBudget]:
    """Return the least budget that works, and the problem with as many turn-around steps as that needs.

    Where the GPU has to make updates behind a gate, the usual number of these steps, which depends on the budget, may
    be too small for their states, or the least budget would be too large for it.
    """
    how: Any = {"time_limit_s": config.solver_time_limit_s, "backend": config.solver}
    problem = lowered.problem
    # That nothing fits shows within seconds; a search for a plan would take minutes to find out.
    least = least_budget(problem, **how)
    most = update_steps(problem.groups, device_budget_bytes=0)
    on_device = any(group.trainable and group.side == "device" for group in problem.groups)
    if not (problem.gate and on_device) or config.turn_around_steps is not None or most <= problem.turn_around_steps:
        return lowered, least
    longer = problem.with_turn_around_steps(most)
    of_longer = least_budget(longer, **how)
    less = (of_longer.resource == "host", of_longer.bytes) < (least.resource == "host", least.bytes)
    if fits(least, problem) or not less:
        return lowered, of_longer if less else least
    return replace(lowered, problem=longer), of_longer


def fits(least: LeastBudget, problem: Problem) -> bool:
    """Return whether the least budget that works is within a problem's."""
    return least.resource != "host" and least.bytes * (1 - _TOLERANCE) <= problem.device_budget_bytes


def lower(
    subject: Subject,
    classes: dict[str, BlockClass],
    prelude_costs: dict[str, NodeCost],
    updates: dict[str, UpdateCost],
    rates: LinkRates,
) -> tuple[Lowered, int]:
    """Build the problem; return it and the bytes on the device that no decision changes."""
    traced, request = subject.traced, subject.request
    captured = traced.captured
    prelude = lower_prelude(captured, traced.chain, traced.blocks, prelude_costs)
    fixed = fixed_bytes(subject.model, captured, updates) + request.margin_bytes
    if request.budget_bytes <= fixed + request.spare_bytes:
        raise InfeasibleBudget(
            f"a budget of {format_bytes(request.budget_bytes)} is too small for the model's buffers and the "
            f"optimizer's scalars, {format_bytes(fixed)}; raise gpu_budget",
            budget_bytes=request.budget_bytes,
        )
    updater, params = subject.updater, dict(subject.model.named_parameters())
    looks = request.clips or request.scales
    trainable = {
        n: Trainable(
            c.state_bytes, updater is not None and updater.by_rows(n, params[n].dtype),
            c.cpu_update_s, c.device_update_s, c.cpu_add_s, c.device_add_s, side_of(request.config.updates, n),
            *_looks_s(request, c), cpu_log_s=c.cpu_log_s if request.speculates else 0.0,
            by_rows_on_host=updater is not None and updater.by_rows_on_host(n, params[n].dtype),
            has_copy=updater is not None and has_master(updater.base, params[n]),
        )
        for n, c in updates.items()
    }  # fmt: skip
    blocks, files = traced.blocks, request.files
    sizes = {name: param.nbytes for name, param in params.items()}

    def lowered_with(storage: StateFiles | None) -> Lowered:
        lowering = Lowering(
            captured, traced.chain, blocks, classes, prelude, traced.incoming, trainable, files, storage, traced.low
        )
        lowered = lowering.problem(
            rates,
            shared_cores=request.device == "emulated",
            device_budget_bytes=request.budget_bytes - fixed - request.spare_bytes,
            host_budget_bytes=request.host_budget_bytes,
            update="planned" if subject.updater is not None else "external",
            user_bytes=request.user_bytes or 0,
            turn_around_steps=request.config.turn_around_steps,
            gate=request.gate,
            together=request.per_step > 1 and not request.adds_up,
            micro_batches=request.per_update if request.adds_up else 1,
            speculates=request.speculates,
            gate_s=_VERDICT * min((c.device_norm_s for c in updates.values()), default=0.0) if looks else 0.0,
        )
        held = host_fixed_bytes(subject.model, captured, lowered.problem, files)
        problem = replace(lowered.problem, host_fixed_bytes=held)
        return replace(lowered, problem=_together(problem, traced, request))

    if states_need_files(sizes, updates, request.host_budget_bytes):
        return lowered_with(request.storage), fixed
    lowered = lowered_with(None)
    if request.storage is not None and values_need_files(lowered.problem, sizes, updates):
        return lowered_with(request.storage), fixed
    return lowered, fixed


def _together(problem: Problem, traced: Traced, request: Request) -> Problem:
    """Return the problem whose steps run several micro-batches, for which random numbers are drawn beforehand."""
    if request.per_step == 1:
        return problem
    start_bytes = max(problem.start_peak_bytes, drawn_bytes(traced) if request.device == EMULATED else 0)
    one = replace(problem, start_peak_bytes=start_bytes, micro_batches=1)
    return in_passes(one, request.per_update, request.per_step)


def _looks_s(request: Request, cost: UpdateCost) -> tuple[float, float]:
    """Return the seconds that unscaling a complete gradient and taking its norm take, on host and device."""
    cpu_s, device_s = (cost.cpu_norm_s, cost.device_norm_s) if request.clips or request.measures else (0.0, 0.0)
    if request.scales:
        cpu_s, device_s = cpu_s + cost.cpu_unscale_s, device_s + cost.device_unscale_s
    return cpu_s, device_s


def fixed_bytes(model: torch.nn.Module, captured: Captured, updates: dict[str, UpdateCost]) -> int:
    """Count the bytes of buffers, constants and optimizer scalars, which are on the device all the time."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    used = (buffers[name] for name in captured.buffers.values())
    on_device = _storages([*used, *captured.constants.values()])
    return sum(on_device.values()) + sum(c.scalar_bytes for c in updates.values())


def host_fixed_bytes(
    model: torch.nn.Module, captured: Captured, problem: Problem, files: FrozenFiles | None = None
) -> int:
    """Count the bytes of a model in RAM that no decision changes: buffers, constants, parameters that no block uses.

    Parameters
    ----------
    files: those of frozen parameters, which are not in RAM as long as no block uses them.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    used = [params[tensor.name] for group in problem.groups for tensor in group.tensors]
    in_files = [params[name] for name in (files.names if files is not None else ())]
    elsewhere = {id(param) for param in (*used, *in_files)}
    unused = (param for param in params.values() if id(param) not in elsewhere)
    # Memory that parameters of groups have, too, is counted with these; on accelerators it has all parameters.
    held = _storages([*unused, *model.buffers(), *captured.constants.values()])
    counted = _storages(used)
    return sum(size for key, size in held.items() if key not in counted)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the memory that some tensors have, which several may share, by its key."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    return {storage_key(storage): storage.nbytes() for storage in storages}


def with_steps(subject: Subject, problem: Problem) -> Subject:
    """Return the subject with a known problem's turn-around steps, which without the costs of updates are not known."""
    config = replace(subject.request.config, turn_around_steps=problem.turn_around_steps)
    return replace(subject, request=replace(subject.request, config=config))


def relower(subject: Subject, plan: Plan) -> Lowered:
    """Rebuild the programs of a stored plan; no times are needed, only what the ledger counts.

    Raises: PlanFileError if what is stored of a block's class does not belong to the model.
    """
    subject = in_low(subject, of_plan(plan, subject.traced))
    stored = {
        key: (c.options, {n: NodeCost(0.0, work, tuple(held)) for n, (work, *held) in c.kernel_bytes.items()})
        for key, c in plan.classes.items()
    }
    unknown_keys = {"", *(b.key for b in subject.traced.blocks)} - stored.keys()
    if unknown_keys:
        raise PlanFileError(
            f"the plan lacks {len(unknown_keys)} of the model's classes of blocks ({min(unknown_keys)!r}, ...), so it "
            "was changed after it was made; plan again"
        )
    classes = {b.key: restore_class(b, *stored[b.key]) for b in subject.traced.blocks}
    unknown = LinkRates(1.0, 1.0, 1.0)
    subject = replace(subject, request=replace(subject.request, budget_bytes=plan.budget_bytes))
    subject = with_steps(subject, plan.problem) if plan.problem is not None else subject
    return lower(subject, classes, stored[""][1], {}, unknown)[0]
