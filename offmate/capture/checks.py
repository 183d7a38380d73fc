"""Checks of models: those that cannot be compiled as they are get an error that names the cause and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ArgumentTypeError, OffmateError, ProtocolError
from ..runtime.torch_names.autograd import hooks_on_saved, without_torch_function
from ..runtime.torch_names.modules import BACKWARD_HOOKS, global_hooks, is_from_torch_compile
from ..runtime.torch_names.tensors import gradient_hooks, late_gradient_hooks
from .hooks import SAVED_WORDS, hook_name, keeps_another_value

_WRAPPERS = {
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DistributedDataParallel (DDP)",
    "FullyShardedDataParallel": "FullyShardedDataParallel (FSDP)",
}


def as_batch(example_inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of an example batch.

    Raises: ArgumentTypeError if it is neither a tuple nor a mapping.
    """
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    raise ArgumentTypeError(
        f"example_inputs is a {type(example_inputs).__name__}; it must be a tuple of positional arguments, such as "
        "(x,), or a dict of keyword arguments, such as {'input_ids': ids}"
    )


def check_model(model: torch.nn.Module) -> None:
    """Raise OffmateError if the model is of a kind that cannot be planned, naming the kind and the remedy."""
    if not isinstance(model, torch.nn.Module):
        raise OffmateError(f"offmate.compile takes a torch.nn.Module, not {type(model).__name__}")
    name = type(model).__name__
    if "_offmate_session" in model.__dict__:
        own = model.__dict__["_offmate_session"].plain_class.__name__
        raise OffmateError(
            f"this {own} is already compiled by offmate, and a model is compiled only once. To compile it again, make "
            "a plain model with copy.deepcopy(model), build an optimizer for its parameters, load the old optimizer's "
            "state_dict() into it, and compile the copy"
        )
    if is_from_torch_compile(model):
        raise OffmateError("the model was compiled by torch.compile; give offmate the original, model._orig_mod")
    if name in _WRAPPERS or any(c.__name__ in _WRAPPERS for c in type(model).__mro__):
        raise OffmateError(f"the model is wrapped in {_WRAPPERS.get(name, name)}; give offmate the inner model.module")
    if any(c.__name__ == "FSDPModule" for c in type(model).__mro__):
        raise OffmateError(
            "the model was sharded by FSDP (fully_shard); offmate plans one unsharded model on one device"
        )
    spread = getattr(model, "hf_device_map", None)
    if spread and len(set(map(str, spread.values()))) > 1:
        raise OffmateError(
            f"the model is spread over {sorted(set(map(str, spread.values())))} by device_map; load it without "
            "device_map, since offmate places its tensors itself"
        )
    _check_tensors(model)
    check_overlaps(model)
    check_module_hooks(model)


def check_module_hooks(model: torch.nn.Module) -> None:
    """Raise ProtocolError if hooks inside the model would not be called by a replay, naming the module."""
    for name, module in model.named_modules():
        hooks = [hook for table in BACKWARD_HOOKS for hook in module.__dict__[table].values()]
        if hooks and module is not model:
            raise ProtocolError(
                f"{name} has a backward hook ({hook_name(hooks[0])}), which the captured graph would not call. Do its "
                "work in a torch.autograd.Function in the forward, or hook the whole model instead, or, without "
                "optimizer=, its parameters"
            )
    if global_hooks():
        raise ProtocolError(
            "there are hooks on all modules (torch.nn.modules.module.register_module_..._hook), which the captured "
            "graph would not call; register them on single modules"
        )


def check_hooks(parameters: tuple[tuple[str, torch.nn.Parameter], ...], planned: bool) -> None:
    """Raise ProtocolError for hooks that the plan would not call, naming the first.

    These are hooks on parameters whose gradients a planned optimizer takes, and hooks around the call that may change
    what autograd saves.

    Parameters
    ----------
    parameters: of the model, by name. planned: whether an optimizer's updates are planned.
    """
    saved = hooks_on_saved()
    if saved is not None and keeps_another_value(saved[0]):
        raise ProtocolError(f"the code around the model's call {SAVED_WORDS.format(hook_name(saved[0]))}")
    if not planned:
        return
    with without_torch_function():
        for name, param in parameters:
            hooks = gradient_hooks(param) or late_gradient_hooks(param)
            if hooks:
                raise ProtocolError(
                    f"{name} has a hook on its gradient ({hook_name(next(iter(hooks.values())))}), but the planned "
                    "optimizer takes gradients before a hook can see them. Remove the hook, or compile without "
                    "optimizer=: gradients then arrive in .grad, and hooks are called"
                )


def hooked(params: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """Return the names of the parameters with hooks on their gradients."""
    with without_torch_function():
        return [n for n, p in params.items() if gradient_hooks(p) or late_gradient_hooks(p)]


def check_overlaps(model: torch.nn.Module) -> None:
    """Raise OffmateError if different parameters share memory, which would be moved and updated twice."""
    sharing: dict[int, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        # `device` is where a parameter is used.
        if param.is_cpu and param.layout is torch.strided and param.numel():
            sharing.setdefault(param.untyped_storage().data_ptr(), []).append((name, param))
    for alike in sharing.values():
        if len(alike) > 1 and any(param.requires_grad for _, param in alike):
            _check_disjoint(alike)


def _check_disjoint(alike: list[tuple[str, torch.nn.Parameter]]) -> None:
    taken = torch.zeros(alike[0][1].untyped_storage().nbytes(), dtype=torch.bool)
    for index, (name, param) in enumerate(alike):
        size = param.element_size()
        steps = tuple(stride * size for stride in param.stride())
        own = taken.as_strided((*param.shape, size), (*steps, 1), param.storage_offset() * size)
        if own.any():
            raise OffmateError(
                f"{name} shares memory with {', '.join(other for other, _ in alike[:index])}, but they are separate "
                "parameters, and an update of one changes the other; make them one parameter (assign the same "
                "nn.Parameter to both), or copy one"
            )
        own.fill_(True)


def _check_tensors(model: torch.nn.Module) -> None:
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None):
        method = getattr(model, "quantization_method", "an unknown method")
        raise OffmateError(
            f"the model's weights are quantised ({method}), which cannot be streamed yet; load it without quantization"
        )
    for name, param in model.named_parameters():
        if param.device.type not in ("cpu", "meta"):
            raise OffmateError(
                f"{name} is on {param.device}; offmate starts from CPU memory. Call model.cpu() first, and do not call "
                "model.to(device) after it"
            )
        if "_offmate" in vars(param) or hasattr(type(param), "_of_a_compiled_model"):
            raise OffmateError(
                f"{name} belongs to another compiled model, too, but only one plan can move and update a parameter. "
                "Give the two models separate parameters, or compile one model that holds both"
            )
        if type(param) not in (torch.nn.Parameter, torch.Tensor):
            kind = type(param).__name__
            raise OffmateError(
                f"{name} is a {kind}, not a plain parameter; quantised and distributed weights cannot be streamed. "
                "Load plain weights (dtype float32, bfloat16 or float16)"
            )
        strides = param.stride() if param.layout is torch.strided else ()
        if param.requires_grad and any(n > 1 and step == 0 for n, step in zip(param.shape, strides)):
            raise OffmateError(
                f"{name}, of shape {tuple(param.shape)}, is expanded: several of its elements share one place in "
                "memory, so an update cannot write each of them. Make a full copy (nn.Parameter(weight.clone())), or "
                "keep the small tensor and expand it in the forward"
            )
        if param.layout is not torch.strided:
            raise OffmateError(
                f"{name} has layout {param.layout}; only strided parameters can be planned. Convert it with to_dense()"
            )
        if param.dtype.is_complex:
            raise OffmateError(
                f"{name} is of {param.dtype}; complex parameters cannot be planned yet. Store it as a real tensor with "
                "a last dimension of 2, and use torch.view_as_complex in the forward"
            )
