"""The arguments of `offmate.compile` and `offmate.plan`: what they ask for, and why some cannot work together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from .capture.checks import check_model
from .config import Config
from .errors import ArgumentTypeError, ArgumentValueError, OffmateError
from .lowering.inductor import check_inductor
from .machines.allocator import check_allocator
from .machines.devices import accelerator, check_budget, default_budget_bytes, device_kind
from .machines.host_memory import default_host_budget_bytes
from .machines.mapped_files import held_bytes
from .optim.probe import check_optimizer
from .optim.updater import parameter_names
from .planning.request import Request
from .planning.storage import storage_paths
from .plans.plan import Plan
from .runtime.storage.folders import StoragePath
from .runtime.torch_names.scalers import can_unscale, unscales_in_its_own_way, unscales_itself
from .sizes import parse_budget
from .split import Split

log = logging.getLogger("offmate")

_MOST_MICRO_BATCHES = 1_000_000  # per update; beyond, seconds of a step are lost among those of an iteration


@dataclass(frozen=True)
class Asked:
    """What is asked for, once it is known to work together.

    Parameters
    ----------
    names: of the parameters whose updates are planned. scaler: the one that scales losses; None without any.
    """

    request: Request
    names: dict[torch.Tensor, str]
    scaler: torch.amp.GradScaler | None


def what_is_asked(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    gpu_budget: int | str,
    cpu_budget: int | str | None,
    device: Any,
    *,
    max_grad_norm: float | None,
    grad_scaler: torch.amp.GradScaler | None,
    accumulation_steps: int | Literal["auto"],
    chooses_steps: bool = False,
    plan: Plan | None = None,
) -> Asked:
    """Return what arguments of `offmate.compile` or `offmate.plan` ask for.

    Parameters
    ----------
    chooses_steps: whether accumulation_steps may be "auto"; the request is then that of one micro-batch per update.
    plan: one to follow, whose budget counts where none is named. The others: as in `offmate.compile`.

    Raises: OffmateError naming what cannot work, the values, and what to try.
    """
    steps: Any = 1 if chooses_steps and accumulation_steps == "auto" else accumulation_steps
    planned = optimizer is not None
    _check_gate(max_grad_norm, steps, planned)
    _check_passes(config, accumulation_steps)
    scaler = _enabled(grad_scaler, planned)
    _check_speculation(config, scaler, optimizer, max_grad_norm)
    check_model(model)
    request = replace(
        request_of(gpu_budget, cpu_budget, device, config, plan, _tensors_of(model, optimizer)),
        micro_batches=steps,
        clips=max_grad_norm is not None,
        measures=_measures(config, max_grad_norm, optimizer),
        scales=scaler is not None,
    )
    if config.backend == "inductor":
        check_inductor(request.device)
    names = planned_names(model, optimizer, config)
    check_unscaling(scaler, names, request.device)
    _check_float16(scaler, names, optimizer, max_grad_norm)
    return Asked(request, names, scaler)


def checked(config: Config | None) -> Config:
    """Return the settings. Raises: ArgumentTypeError for anything but settings."""
    if config is not None and not isinstance(config, Config):
        raise ArgumentTypeError(f"config= is a {type(config).__name__}; it must be an offmate.Config(...), or None")
    return config or Config()


def request_of(
    gpu_budget: int | str,
    cpu_budget: int | str | None,
    device: Any,
    config: Config,
    plan: Plan | None = None,
    held: Iterable[torch.Tensor] = (),
) -> Request:
    """Return the request with these budgets, where "auto" is what this machine has.

    Parameters
    ----------
    held: tensors of the model and its optimizer. Plans count them, so that the RAM that they take already is not free
        but belongs to the budget. The others: as in `offmate.compile`.

    Raises: OffmateError.
    """
    kind = device_kind(device)
    check_allocator(accelerator(kind))
    automatic_host = cpu_budget is None or is_auto(cpu_budget)
    if automatic_host:
        host = default_host_budget_bytes() + held_bytes(held)
    else:
        host = parse_budget(cpu_budget, "cpu_budget")  # type: ignore[arg-type]
    automatic = is_auto(gpu_budget) and plan is None
    if automatic:
        budget = default_budget_bytes(kind)
    elif plan is not None and is_auto(gpu_budget):
        budget = plan.budget_bytes
    else:
        budget = parse_budget(gpu_budget, "gpu_budget")
    check_budget(kind, budget)
    return Request(budget, host, kind, config, automatic=automatic, automatic_host=automatic_host)


def _tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a model, and the states of its optimizer."""
    yield from model.parameters()
    yield from model.buffers()
    for state in optimizer.state.values() if isinstance(optimizer, torch.optim.Optimizer) else ():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def is_auto(budget: object) -> bool:
    """Return whether a budget is left to offmate."""
    return isinstance(budget, str) and budget == "auto"


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
            "number with accumulation_steps= (Trainer's gradient_accumulation_steps=), or leave "
            "micro_batches_per_pass out"
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


def warn_of_disabled(scaler: torch.amp.GradScaler | None) -> None:
    """Warn that a plan for another machine does not scale losses, though a scaler was passed."""
    if scaler is not None:
        log.warning(
            "grad_scaler= is disabled, as torch.amp.GradScaler('cuda') is where there is no such device, so the plan "
            "is for losses that are not scaled. To plan for a scaler, pass torch.amp.GradScaler('cpu')"
        )


def check_unscaling(scaler: torch.amp.GradScaler | None, names: dict[torch.Tensor, str], kind: str) -> None:
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


def _check_float16(
    scaler: torch.amp.GradScaler | None,
    names: dict[torch.Tensor, str],
    optimizer: torch.optim.Optimizer | None,
    max_grad_norm: float | None,
) -> None:
    """Raise OffmateError if torch would refuse, at the first step, to unscale gradients of float16 parameters."""
    of_float16 = [name for param, name in names.items() if param.dtype == torch.float16]
    in_the_update = max_grad_norm is None and optimizer is not None and unscales_itself(optimizer)
    if scaler is None or not of_float16 or in_the_update:
        return
    rest = f" and {len(of_float16) - 1} more" if len(of_float16) > 1 else ""
    raise OffmateError(
        f"grad_scaler= cannot unscale gradients in float16, which PyTorch refuses: those of {of_float16[0]}{rest}. "
        "Keep these parameters in float32, and run the forward under torch.autocast with dtype=torch.float16"
    )


def planned_names(
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


def stored_in(storage: Any, planned: bool) -> tuple[StoragePath, ...]:
    """Return the folders that `storage=` names. Raises: OffmateError for others, or if no updates are planned."""
    paths = storage_paths(storage)
    if paths and not planned:
        raise ArgumentValueError(
            "storage= keeps optimizer states and activations, and needs optimizer=; without one, your own code holds "
            "the states"
        )
    return paths
