"""Private names of modules and optimizers: the places of what public methods add to or count."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as _module
from torch.optim import optimizer as _optimizer

PARAMETERS, BUFFERS, MODULES = TABLES = ("_parameters", "_buffers", "_modules")
"""A module's dictionaries of its own members; the public generators do not show aliases and replacements."""

parameters_of: Callable[[torch.nn.Module], dict[str, Any]] = operator.attrgetter(PARAMETERS)
buffers_of: Callable[[torch.nn.Module], dict[str, Any]] = operator.attrgetter(BUFFERS)
"""These dictionaries of a module."""

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""A module's dictionaries of hooks around its forward; the public API can only add hooks."""

BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
"""A module's dictionaries of hooks on gradients; the public API can only add hooks."""

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""An optimizer's dictionaries of hooks around its step; the public API can only add hooks."""

# Recurrent modules keep second references to their parameters in these.
RECURRENT_WEIGHTS = ("_flat_weights", "_flat_weight_refs")

CALL = "_call_impl"
"""The method that calling a module runs, hooks included; an instance attribute of this name runs instead of it."""

CAUSAL_MASK_FINDER = "_detect_is_causal_mask"
"""The function by which `nn.Transformer`'s encoder and decoder look whether a mask is the causal one."""

CAUSAL_MASK_MAKER = "_generate_square_subsequent_mask"
"""The function that makes the causal mask, for them and for `nn.Transformer.generate_square_subsequent_mask`."""

_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
)  # fmt: skip

_GLOBAL_STEP_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__  # of the wrapper that every class gets

_WRAPPED = "_wrapped_by_lr_sched"
_STEPPED = "_opt_called"


def global_hooks() -> list[Any]:
    """Give the hooks that are called around every module; the public API can only add them."""
    return [hook for name in _GLOBAL_HOOKS for hook in getattr(_module, name).values()]


def is_from_torch_compile(model: torch.nn.Module) -> bool:
    """Say whether `torch.compile` made a module; what it returns is of no public class."""
    return isinstance(model, torch._dynamo.eval_frame.OptimizedModule)


def conversion(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, bool, Any]:
    """Give the device, dtype, non_blocking flag and memory format that the arguments of a module's `to` ask for.

    `Module.to` parses them by this function, and does not expose the result.
    """
    asked: tuple[Any, Any, bool, Any] = torch._C._nn._parse_to(*args, **kwargs)
    return asked


def state_at_construction(kind: type[Any], hyper: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Give the state of a parameter that an optimizer's constructor makes, empty where the first update does.

    Of torch's optimizers only Adagrad's constructor makes one, in torch 2.11.0 but not in 2.13.0.

    Parameters
    ----------
    kind: class of the optimizer. hyper: hyperparameters of the parameter's group.
    """
    if not issubclass(kind, torch.optim.Adagrad) or not _adagrad_begins_with_states():
        return {}
    first, fused = hyper["initial_accumulator_value"], hyper["fused"]
    return dict(torch.optim.Adagrad([param], initial_accumulator_value=first, fused=fused).state[param])


@functools.cache
def _adagrad_begins_with_states() -> bool:
    return bool(torch.optim.Adagrad([torch.zeros(1)]).state)


def step_hooks(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Give the hooks before and after an optimizer's step in torch's order: its own, and those of all optimizers."""
    (before, after), (all_before, all_after) = STEP_HOOKS, _GLOBAL_STEP_HOOKS
    first, last = getattr(_optimizer, all_before).values(), getattr(_optimizer, all_after).values()
    return [*first, *vars(optimizer)[before].values()], [*vars(optimizer)[after].values(), *last]


def bare_step(kind: type[Any]) -> Callable[[Any], Any]:
    """Give the step of a class of optimizers without the wrapper that calls hooks, also those of all optimizers."""
    step: Any = kind.step
    wrapped: Callable[[Any], Any] = step.__wrapped__ if getattr(step, "__code__", None) is _HOOKED else step
    return wrapped


def note_step(optimizer: Any) -> None:
    """Mark an optimizer as having stepped; otherwise schedulers warn, and only their own wrapper sets this mark."""
    setattr(optimizer, _STEPPED, True)


def marked_as_scheduled(step: Any) -> Any:
    """Mark an optimizer's step as one that a scheduler may count; schedulers warn of any other and have no switch."""
    setattr(step, _WRAPPED, True)
    return step
