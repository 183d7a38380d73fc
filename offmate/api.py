"""The two entry points: `offmate.compile` and `offmate.plan`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch

from .arguments import checked, is_auto, planned_names, request_of, stored_in, warn_of_disabled, what_is_asked
from .capture.checks import check_model
from .capture.fake import is_without_memory
from .config import Config
from .errors import OffmateError
from .lowering.frozen_files import FrozenFiles
from .machines.devices import accelerator
from .machines.hardware import Hardware, load
from .machines.hardware import names as names_of_hardware
from .optim.updater import Updater
from .planning.accumulation import check_accumulation
from .planning.batch_size import check_batch_size
from .planning.outlook import Outlook, outlooks_elsewhere
from .planning.request import Request
from .planning.sizing import Sizing, ready
from .planning.storage import Folder, storage_here, with_drives
from .plans.plan import Plan, check_plan
from .progress import planning_progress
from .session.checkpoint_files import files_here
from .session.module import take_over as take_over_model
from .session.optimizer import take_over as take_over_optimizer
from .session.parameter_files import let_leave
from .session.scaling import take_over as take_over_scaler
from .session.session import Session

_ENDLESS_BYTES = 2**62

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
    cpu_budget: the most bytes of RAM for training; None or "auto" takes what is available, less a margin.
    storage: folders that optimizer states and activations may leave to where RAM has no room for them, each on a disk
        of its own (an NVMe drive, say). `offmate.StoragePath` names one whose rates are known; others are measured now.
        Needs optimizer=.
    plan: one that `offmate.plan` or `offmate.load_plan` returned.
    config: settings of planning.

    Returns: the same object. Raises: OffmateError naming what cannot work, the values, and what to try.
    Source: OffMate, section 1 (the one-line interface).
    """
    config = checked(config)
    if plan is not None:
        check_plan(plan)
    asked = what_is_asked(
        model, optimizer, config, gpu_budget, cpu_budget, device,
        max_grad_norm=max_grad_norm, grad_scaler=grad_scaler, accumulation_steps=accumulation_steps, plan=plan,
    )  # fmt: skip
    paths = stored_in(storage, optimizer is not None)
    session = Session(
        model, asked.request, optimizer, asked.names, plan, planning_progress, max_grad_norm, asked.scaler, paths
    )
    take_over_model(model, session)
    if optimizer is not None:
        take_over_optimizer(optimizer, session)
    if asked.scaler is not None:
        take_over_scaler(asked.scaler)
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
        accumulation_steps="auto", size and number are picked in turn until neither brings more samples per second.
    The others: as in `compile`.

    Returns: the plan, to look at, save, or hand to `compile`. Raises: as `compile`, and InfeasibleBudget.
    """
    config = replace(checked(config), backend="eager")  # the plan is the same for every backend, and nothing runs
    fewest = accumulation_steps == "auto"
    check_accumulation(accumulation_steps, optimizer is not None)
    check_batch_size(batch_size)
    asked = what_is_asked(
        # Another machine has its own device, so there is no need to look for one on this machine.
        model, optimizer, config, gpu_budget, cpu_budget, device if hardware is None else device or "emulated",
        max_grad_norm=max_grad_norm, grad_scaler=grad_scaler, accumulation_steps=accumulation_steps, chooses_steps=True,
    )  # fmt: skip
    request = asked.request.by_block if config.named_order == "by block" and not fewest else asked.request
    machine = _machine(hardware, model)
    if machine is not None and asked.scaler is None:
        warn_of_disabled(grad_scaler)
    if machine is None:
        request = replace(request, storage=storage_here(stored_in(storage, optimizer is not None), request.device))
        known: contextlib.AbstractContextManager[FrozenFiles | None] = files_here(model, request)
    else:
        request = with_drives(model, storage, _elsewhere(request, machine, gpu_budget), machine, optimizer is not None)
        known = contextlib.nullcontext(request.files)
    drives = request.storage
    if drives is not None and drives.for_parameters:  # as a session decides
        drives = replace(drives, for_parameters=let_leave(tuple(model.named_parameters()))[0])
    updater = Updater(optimizer, asked.names, request.device) if optimizer is not None else None
    where = accelerator(request.device) if machine is None else None
    with known as files, ready(model, example_inputs, where) as (batch, say):
        request = replace(request, storage=drives, files=files)
        return Sizing(model, batch, request, updater, machine, say, fewest).plan(batch_size)


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
    config = checked(None)
    machine = load(hardware)
    request = replace(
        request_of(gpu_budget, cpu_budget, "emulated", config),
        micro_batches=accumulation_steps,
        clips=max_grad_norm is not None,
        scales=grad_scaler is not None and grad_scaler.is_enabled(),
    )
    request = with_drives(model, storage, _elsewhere(request, machine, gpu_budget), machine, True)
    updaters = [
        None if one is None else Updater(one, planned_names(model, one, config), request.device) for one in optimizers
    ]
    with ready(model, example_inputs, None) as ((args, kwargs), say):
        yield from outlooks_elsewhere(model, args, kwargs, request, updaters, machine, say)


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
    if is_auto(gpu_budget):
        request = replace(request, budget_bytes=machine.default_budget_bytes)
    return replace(request, device="emulated" if machine.shared_cores else machine.name)
