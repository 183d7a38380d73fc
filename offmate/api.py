"""The two entry points: `offmate.compile` and `offmate.plan`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch

from .capture.checks import as_batch, check_model
from .capture.fake import is_without_memory
from .capture.kv_caches import without_cache
from .config import Config
from .errors import ArgumentTypeError, ArgumentValueError, OffmateError
from .lowering.frozen_files import FrozenFiles
from .lowering.inductor import check_inductor
from .machines.allocator import check_allocator
from .machines.devices import accelerator, check_budget, default_budget_bytes, device_kind, rng_untouched
from .machines.hardware import Hardware, load
from .machines.hardware import names as names_of_hardware
from .machines.host_memory import default_host_budget_bytes
from .optim.probe import check_optimizer
from .optim.updater import Updater, parameter_names
from .planning.accumulation import check_accumulation, of_update, planned_with_fewest
from .planning.batch_size import batch_size_of, check_batch_size, fastest_batch_size, planned_within, resized
from .planning.before_gate import with_break_even
from .planning.outlook import Outlook, outlooks_elsewhere
from .planning.placement import fitted, pockets
from .planning.planner import make_plan, plan_elsewhere, trace_once
from .planning.request import Prepared, Request
from .planning.storage import Folder, storage_here, storage_paths, with_drives
from .planning.subject import Subject
from .plans.plan import Plan, check_plan
from .progress import Progress, planning_progress
from .runtime.current import entered
from .runtime.storage.folders import StoragePath
from .runtime.torch_names.scalers import can_unscale, unscales_in_its_own_way, unscales_itself
from .session.checkpoint_files import files_here
from .session.module import take_over as take_over_model
from .session.optimizer import take_over as take_over_optimizer
from .session.parameter_files import may_leave
from .session.scaling import take_over as take_over_scaler
from .session.session import Session
from .sizes import parse_budget
from .split import Split

log = logging.getLogger("offmate")

_ENDLESS_BYTES = 2**62
_MOST_MICRO_BATCHES = 1_000_000  # per update; beyond, seconds of a step are lost among those of an iteration
_SIZING_S = 20.0  # time limit of the search for one batch size

Model = TypeVar("Model", bound=torch.nn.Module)


def compile(
    model: Model,
    gpu_budget: int | str = "auto",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    max_grad_norm: float | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    accumulation_steps: int = 1,
    device: str | torch.device | None = None,
    cpu_budget: int | str | None = None,
    storage: Folder | Sequence[Folder] | None = None,
    plan: Plan | None = None,
    config: Config | None = None,
) -> Model:
    """Make a model train within a GPU memory budget, with the numbers of plain PyTorch.

    The training loop around it stays as it is. Capture, profiling and solving happen at the first batch, or ahead of
    time with `offmate.plan`.

    On the emulated device, losses, parameters and optimizer states are bit for bit those of the same loop in plain
    PyTorch on a CPU, however the updates are split. On a GPU, they are those of plain PyTorch with the same form of
    updates and the same split between CPU and GPU (`model.offmate.split`), since optimizer kernels round differently
    there. On a GPU, all plans of a session keep the split of the first one. A resumed run keeps it with
    `Config(updates=...)` or `model.offmate.load_plans`.

    Parameters
    ----------
    model: any module that torch.export can capture; it is changed in place and stays an instance of its class.
    gpu_budget: bytes of GPU memory, as an integer or text such as "12GiB"; "auto" takes what is free, less a margin.
    optimizer: the instance that the loop steps; its updates become part of the plan. `fused` and `foreach` are
        respected. If neither is given, updates run as in plain PyTorch on a CPU, and fused on a GPU. Without an
        optimizer, gradients end up in `.grad` on the CPU.
    max_grad_norm: clip the global norm of all gradients to this, like `torch.nn.utils.clip_grad_norm_` before the
        step; infinity only measures it (`model.offmate.grad_norm`). Needs optimizer=.
    grad_scaler: the `torch.amp.GradScaler` that scales the losses and steps the optimizer. Gradients are unscaled and
        checked as soon as they are complete, and no update begins before the scaler's step. With `optimizer=`, scaling
        needs it; a disabled scaler counts as none.
    accumulation_steps: how many forwards and backwards make one optimizer step. A step after fewer of them works, but
        the CPU then makes all its updates, which takes longer. Needs optimizer=; without one, gradients add up in
        `.grad` as usual.
    device: "cuda", "cuda:1" or "emulated"; None takes a GPU if there is one.
    cpu_budget: bytes of RAM; None or "auto" takes what is available to this process, less a margin.
    storage: folders that optimizer states and activations may leave to where RAM has no room for them, each on a disk
        of its own (an NVMe drive, say). `offmate.StoragePath` names one whose rates are known; others are measured now.
        Needs optimizer=.
    plan: one that `offmate.plan` or `offmate.load_plan` returned.
    config: settings of planning.

    Returns: the same object. Raises: OffmateError naming what cannot work, the values, and what to try.
    Source: OffMate, section 1 (the one-line interface).
    """
    config = _checked(config)
    if plan is not None:
        check_plan(plan)
    _check_gate(max_grad_norm, accumulation_steps, optimizer is not None)
    _check_passes(config, accumulation_steps)
    scaler = _enabled(grad_scaler, optimizer is not None)
    _check_speculation(config, scaler, optimizer, max_grad_norm)
    check_model(model)
    request = _request(gpu_budget, cpu_budget, device, config, plan)
    if config.backend == "inductor":
        check_inductor(request.device)
    request = replace(
        request,
        micro_batches=accumulation_steps,
        clips=max_grad_norm is not None,
        measures=_measures(config, max_grad_norm, optimizer),
        scales=scaler is not None,
    )
    names = _planned_names(model, optimizer, config)
    _check_unscaling(scaler, names, request.device)
    paths = _storage(storage, optimizer is not None)
    session = Session(model, request, optimizer, names, plan, planning_progress, max_grad_norm, scaler, paths)
    take_over_model(model, session)
    if optimizer is not None:
        take_over_optimizer(optimizer, session)
    if scaler is not None:
        take_over_scaler(scaler)
    return model


def plan(
    model: torch.nn.Module,
    gpu_budget: int | str = "auto",
    *,
    example_inputs: dict[str, Any] | tuple[Any, ...],
    optimizer: torch.optim.Optimizer | None = None,
    max_grad_norm: float | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    accumulation_steps: int | Literal["auto"] = 1,
    device: str | torch.device | None = None,
    cpu_budget: int | str | None = None,
    hardware: str | None = None,
    storage: float | Folder | Sequence[Folder | FrozenFiles] | None = None,
    batch_size: int | Literal["auto"] | None = None,
    config: Config | None = None,
) -> Plan:
    """Plan a model's training iteration without changing the model.

    Parameters
    ----------
    example_inputs: one batch, as keyword arguments (dict) or positional ones (tuple).
    hardware: name ("rtx3060", ...) or path of a hardware file (`offmate profile` writes one): plan for that machine
        instead of this one, from its rates. Parameters and batch may then be on the meta device.
    storage: folders that optimizer states may leave to, as in `compile`. With hardware=, either folders of that machine
        or only the rate at which its drive reads the checkpoint, such as "7GB/s". A folder's rates are those that the
        hardware file lists (`offmate profile --storage`), or those of `offmate.StoragePath(folder, read=...,
        write=...)`. Frozen parameters that RAM has no room for then come from there. On this machine their files are
        found and measured.
    accumulation_steps: as in `compile`; "auto" picks the fewest after which one more adds less than 1 % of samples per
        second, up to 64, and their order unless `Config(accumulation_order=)` names it (`Plan.accumulation_steps`,
        `Plan.accumulation`). More samples per update change what is learned, so use it only if you may choose their
        number.
    batch_size: plan for this many samples instead of the example's; "auto" picks the size with the highest predicted
        throughput (`Plan.batch_size`). Use it only if you may change the batch size. Together with
        accumulation_steps="auto", the size is picked for one micro-batch per update, then their number for that size.
    The others: as in `compile`.

    Returns: the plan, to look at, save, or hand to `compile`. Raises: as `compile`, and InfeasibleBudget.
    """
    config = _checked(config)
    fewest = accumulation_steps == "auto"
    check_accumulation(accumulation_steps, optimizer is not None)
    steps = 1 if accumulation_steps == "auto" else accumulation_steps
    _check_gate(max_grad_norm, steps, optimizer is not None)
    _check_passes(config, accumulation_steps)
    scaler = _enabled(grad_scaler, optimizer is not None)
    _check_speculation(config, scaler, optimizer, max_grad_norm)
    check_batch_size(batch_size)
    check_model(model)
    # The plan is the same for every backend, and nothing runs.
    config = replace(config, backend="eager")
    # Another machine has its own device, so there is no need to look for one on this machine.
    planned_device = device if hardware is None else device or "emulated"
    request = _request(gpu_budget, cpu_budget, planned_device, config, None)
    request = replace(
        request,
        micro_batches=steps,
        clips=max_grad_norm is not None,
        measures=_measures(config, max_grad_norm, optimizer),
        scales=scaler is not None,
    )
    if config.named_order == "by block" and not fewest:
        request = request.by_block
    names = _planned_names(model, optimizer, config)
    _check_unscaling(scaler, names, request.device)
    machine = _machine(hardware, model)
    if machine is not None:
        request = _elsewhere(request, machine, gpu_budget)
    if machine is None:
        request = replace(request, storage=storage_here(_storage(storage, optimizer is not None), request.device))
        known: contextlib.AbstractContextManager[FrozenFiles | None] = files_here(model, request)
    else:
        request = with_drives(model, storage, request, machine, optimizer is not None)
        known = contextlib.nullcontext(request.files)
    drives = request.storage
    if drives is not None and drives.for_parameters:  # as a session decides
        drives = replace(drives, for_parameters=may_leave(tuple(model.named_parameters())))
        request = replace(request, storage=drives)
    with known as files:
        request = replace(request, files=files)
        return _planned(model, example_inputs, batch_size, request, optimizer, names, machine, fewest)


def _planned(
    model: torch.nn.Module,
    example_inputs: dict[str, Any] | tuple[Any, ...],
    batch_size: int | Literal["auto"] | None,
    request: Request,
    optimizer: torch.optim.Optimizer | None,
    names: dict[torch.Tensor, str],
    machine: Hardware | None,
    fewest: bool,
) -> Plan:
    updater = Updater(optimizer, names, request.device) if optimizer is not None else None
    with _ready(model, example_inputs, accelerator(request.device) if machine is None else None) as (batch, say):
        return _sized(model, batch, batch_size, request, updater, machine, say, fewest)


def outlooks(
    model: torch.nn.Module,
    gpu_budget: int | str,
    *,
    example_inputs: dict[str, Any] | tuple[Any, ...],
    optimizers: Sequence[torch.optim.Optimizer | None],
    hardware: str,
    max_grad_norm: float | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    accumulation_steps: int = 1,
    cpu_budget: int | str | None = None,
    storage: float | Folder | Sequence[Folder] | None = None,
) -> Iterator[Outlook]:
    """Yield what `plan` would plan for with each optimizer on another machine, without planning it.

    Parameters
    ----------
    optimizers: of the same model, one after the other. The others: as in `plan`.

    Raises: as `plan`, except that a budget may be too small.
    """
    check_model(model)
    scaler = grad_scaler is not None and grad_scaler.is_enabled()
    config = _checked(None)
    request = _request(gpu_budget, cpu_budget, "emulated", config, None)
    request = replace(request, micro_batches=accumulation_steps, clips=max_grad_norm is not None, scales=scaler)
    machine = load(hardware)
    request = _elsewhere(request, machine, gpu_budget)
    request = with_drives(model, storage, request, machine, True)
    updaters = [
        None if one is None else Updater(one, _planned_names(model, one, config), request.device) for one in optimizers
    ]
    with _ready(model, example_inputs, None) as ((args, kwargs), say):
        yield from outlooks_elsewhere(model, args, kwargs, request, updaters, machine, say)


@contextlib.contextmanager
def _ready(
    model: torch.nn.Module, example_inputs: dict[str, Any] | tuple[Any, ...], where: torch.device | None
) -> Iterator[tuple[tuple[tuple[Any, ...], dict[str, Any]], Progress]]:
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


def _machine(hardware: str | None, model: torch.nn.Module) -> Hardware | None:
    if hardware is not None:
        return load(hardware)
    if is_without_memory(model):
        raise OffmateError(
            "parameters are on the meta device, so nothing can be measured; name a machine with hardware=, one of "
            f"{', '.join(names_of_hardware())}"
        )
    return None


def _elsewhere(request: Request, machine: Hardware, gpu_budget: int | str) -> Request:
    """Return the request for another machine; budgets that were left open become that machine's defaults."""
    if request.automatic_host:
        request = replace(request, host_budget_bytes=machine.host_memory_bytes or _ENDLESS_BYTES)
    if _is_auto(gpu_budget):
        request = replace(request, budget_bytes=machine.default_budget_bytes)
    return replace(request, device="emulated" if machine.shared_cores else machine.name)


def _sized(
    model: torch.nn.Module,
    batch: tuple[tuple[Any, ...], dict[str, Any]],
    batch_size: int | Literal["auto"] | None,
    request: Request,
    updater: Updater | None,
    machine: Hardware | None,
    say: Progress,
    fewest: bool,
) -> Plan:
    """Plan for a batch of this size; "auto" stands for the size that the solver predicts to be the fastest."""

    usual = request.speculating(False) if request.chooses else request

    def planned(size: int | None, request: Request = usual, fewest: bool = fewest) -> Plan:
        args, kwargs = batch if size is None else resized(batch, size)
        if machine is not None:
            return plan_elsewhere(model, args, kwargs, request, updater, machine, say, fewest=fewest)
        return _here(model, args, kwargs, request, updater, say, fewest)

    def compared(plan: Plan) -> Plan:
        def again(own: Request) -> Plan:
            own = of_update(own, plan.accumulation_steps, plan.accumulation_order) if fewest else own
            return planned(plan.batch_size, own, fewest=False)

        return with_break_even(plan, again, request, machine is not None)

    if batch_size is None:
        return compared(planned(None))
    if batch_size != "auto":
        return compared(replace(planned(batch_size), batch_size=batch_size))
    plan = planned_within(lambda size: planned(size, fewest=False), batch_size_of(batch))
    fastest = plan.batch_size
    if plan.problem is not None and plan.batch_size is not None:
        config = request.config
        limit_s = min(config.solver_time_limit_s, _SIZING_S)
        fastest = fastest_batch_size(plan.problem, plan.batch_size, limit_s, config.solver_gap, say)
    if fastest is not None and (fewest or fastest != plan.batch_size):
        plan = planned_within(planned, fastest)
    return compared(plan)


def _here(
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


def _checked(config: Config | None) -> Config:
    if config is not None and not isinstance(config, Config):
        raise ArgumentTypeError(f"config= is a {type(config).__name__}; it must be an offmate.Config(...), or None")
    return config or Config()


def _check_gate(max_grad_norm: float | None, accumulation_steps: int, planned: bool) -> None:
    if max_grad_norm is not None:
        number = isinstance(max_grad_norm, int | float) and not isinstance(max_grad_norm, bool)
        if not number or not max_grad_norm > 0:
            raise ArgumentValueError(
                f"max_grad_norm is {max_grad_norm!r}; it must be a number above 0, or None to leave gradients as they "
                'are; float("inf") only measures the norm'
            )
        if not planned:
            raise OffmateError(
                f"max_grad_norm={max_grad_norm} needs optimizer=. Without an optimizer, gradients are in .grad after "
                "backward(): call torch.nn.utils.clip_grad_norm_ before your own optimizer.step()"
            )
    whole = isinstance(accumulation_steps, int) and not isinstance(accumulation_steps, bool)
    if not whole or not 1 <= accumulation_steps <= _MOST_MICRO_BATCHES:
        hint = '; offmate.plan finds one for "auto" (plan.accumulation_steps)' if accumulation_steps == "auto" else ""
        raise ArgumentValueError(
            f"accumulation_steps is {accumulation_steps!r}; it must be a whole number from 1 to "
            f"{_MOST_MICRO_BATCHES:,}{hint}"
        )
    if accumulation_steps > 1 and not planned:
        raise OffmateError(
            f"accumulation_steps={accumulation_steps} needs optimizer=. Leave it out to accumulate yourself: without "
            "an optimizer, gradients of several backward() calls add up in .grad as usual"
        )


def _check_passes(config: Config, accumulation_steps: int | Literal["auto"]) -> None:
    if (config.micro_batches_per_pass or 1) > 1 and accumulation_steps == 1:
        raise ArgumentValueError(
            f"micro_batches_per_pass is {config.micro_batches_per_pass}, but an update has one micro-batch; name their "
            "number with accumulation_steps=, or leave micro_batches_per_pass out"
        )


def _measures(config: Config, max_grad_norm: float | None, optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether the norm of all gradients is only measured. Raises: OffmateError without an optimizer."""
    if config.measure_grad_norm and optimizer is None:
        raise OffmateError(
            "Config(measure_grad_norm=True) needs optimizer=. Without an optimizer, gradients are in .grad after "
            "backward(): call torch.nn.utils.get_total_norm"
        )
    return config.measure_grad_norm and max_grad_norm is None


def _check_speculation(
    config: Config,
    scaler: torch.amp.GradScaler | None,
    optimizer: torch.optim.Optimizer | None,
    max_grad_norm: float | None,
) -> None:
    """Raise OffmateError if updates cannot be undone, since their kernels unscale the gradients that they read."""
    own = optimizer is not None and unscales_itself(optimizer)
    if config.speculate and scaler is not None and max_grad_norm is None and own:
        raise OffmateError(
            f"Config(speculate={config.speculate!r}) cannot undo updates of a fused {type(optimizer).__name__} with "
            "grad_scaler=: its kernel unscales gradients in place. Pass max_grad_norm=float('inf'), which has "
            "gradients unscaled before, or leave speculate= or fused=True out"
        )


def _enabled(scaler: torch.amp.GradScaler | None, planned: bool) -> torch.amp.GradScaler | None:
    """Return the scaler if it scales. Raises: OffmateError if a plan cannot do what it does."""
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentTypeError(
            f"grad_scaler= is a {type(scaler).__name__}; it must be a torch.amp.GradScaler, or None"
        )
    if not scaler.is_enabled():
        return None
    if not planned:
        raise OffmateError(
            "grad_scaler= needs optimizer=. Leave it out to scale the losses yourself: without an optimizer, gradients "
            "are in .grad after backward(), and any scaler works on them as usual"
        )
    if unscales_in_its_own_way(scaler):
        raise OffmateError(
            f"grad_scaler= is a {type(scaler).__name__}, which unscales gradients in its own way. A plan cannot do "
            "that. Pass a plain torch.amp.GradScaler, or compile without optimizer="
        )
    return scaler


def _check_unscaling(scaler: torch.amp.GradScaler | None, names: dict[torch.Tensor, str], kind: str) -> None:
    """Raise OffmateError if a card has no kernel for what the scaler does with the gradients of planned parameters."""
    where = accelerator(kind)
    if scaler is None or where is None:
        return
    cannot = [(name, param.dtype) for param, name in names.items() if not can_unscale(param.dtype, where)]
    if cannot:
        name, dtype = cannot[0]
        rest = f" and {len(cannot) - 1} more" if len(cannot) > 1 else ""
        raise OffmateError(
            f"grad_scaler= cannot unscale gradients of {dtype} on {where}, where torch has no kernel for it: those of "
            f"{name}{rest}. Leave grad_scaler= out; {dtype} has the range of float32 and needs no scaled losses"
        )


def _planned_names(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, config: Config
) -> dict[torch.Tensor, str]:
    """Return the names of the parameters whose updates are planned. Raises: OffmateError if they cannot be."""
    names = parameter_names(model, optimizer) if optimizer is not None else {}
    _check_updates(config, names)
    if optimizer is None:
        return names
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p not in names]
    if missing:
        raise OffmateError(
            f"{len(missing)} parameters require a gradient, but are not in the optimizer ({missing[0]}, ...); freeze "
            "them with requires_grad_(False), or add them to the optimizer"
        )
    check_optimizer(optimizer)
    return names


def _check_updates(config: Config, names: dict[torch.Tensor, str]) -> None:
    if config.updates == "auto":
        return
    if not names:
        raise OffmateError(
            f"Config(updates={config.updates!r}) needs optimizer=. Pass one, or leave updates= out: without an "
            "optimizer, your own code updates the parameters on the CPU"
        )
    if isinstance(config.updates, Split):
        unknown = {*config.updates.host, *config.updates.device} - set(names.values())
        if unknown:
            raise OffmateError(
                f"Config(updates=Split(...)) names {len(unknown)} parameters that are not in the optimizer "
                f"({min(unknown)}, ...); use the split of a plan for this model"
            )


def _storage(storage: Any, planned: bool) -> tuple[StoragePath, ...]:
    paths = storage_paths(storage)
    if paths and not planned:
        raise ArgumentValueError(
            "storage= keeps optimizer states and activations, and needs optimizer=; without one, your own code holds "
            "the states"
        )
    return paths


def _request(
    gpu_budget: int | str, cpu_budget: int | str | None, device: Any, config: Config, plan: Plan | None
) -> Request:
    kind = device_kind(device)
    check_allocator(accelerator(kind))
    automatic_host = cpu_budget is None or _is_auto(cpu_budget)
    host = default_host_budget_bytes() if automatic_host else parse_budget(cpu_budget, "cpu_budget")  # type: ignore[arg-type]
    automatic = _is_auto(gpu_budget) and plan is None
    if automatic:
        budget = default_budget_bytes(kind)
    elif plan is not None and _is_auto(gpu_budget):
        budget = plan.budget_bytes
    else:
        budget = parse_budget(gpu_budget, "gpu_budget")
    check_budget(kind, budget)
    return Request(budget, host, kind, config, automatic=automatic, automatic_host=automatic_host)


def _is_auto(budget: object) -> bool:
    return isinstance(budget, str) and budget == "auto"
