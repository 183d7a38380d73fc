"""Hooks during the export of a model: which are called, and which are refused."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from ..errors import CaptureError
from ..guards.python_objects import is_collecting
from ..runtime.torch_names.modules import CALL, FORWARD_HOOKS

# The hooks of these packages are part of what their models compute; nothing reads what they leave behind.
_PACKAGES = frozenset(("torch", "transformers", "peft", "accelerate", "trl"))


_SEEDS = [
    *((where, name) for where in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")),
    (torch.random, "fork_rng"),
]


def _no_seed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        if str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0] == "torch":
            return original(*args, **kwargs)
        raise CaptureError(
            f"the forward calls torch.{name}(), which a graph cannot hold: it would draw other numbers than plain "
            "PyTorch. Set the seed outside of the model, or draw once and pass the result"
        )

    return refused


SAVED_WORDS = (
    "packs what autograd saves (saved_tensors_hooks with {}); the plan decides where saved tensors are, and would not "
    "call it. Remove it"
)


def keeps_another_value(pack: Any) -> bool:
    """Return whether a hook may change what autograd saves; hooks of libraries only move it or recompute it."""
    return not of_a_package(pack)


def hook_name(hook: Any) -> str:
    """Return the name of a hook for a message."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def of_a_package(hook: Any) -> bool:
    """Return whether a hook is part of what a library's models compute."""
    return str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0] in _PACKAGES


@contextlib.contextmanager
def hooks_replaced(model: torch.nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Call every forward hook inside the model through `call`; the model's own hooks run around what is captured."""
    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    names = {module: name for name, module in model.named_modules()}
    try:
        for module in model.modules():
            for table in (vars(module)[name] for name in FORWARD_HOOKS):
                if table:
                    kept.append((table, OrderedDict(table)))
                    _replace_hooks(table, {} if module is model else _called(table, names[module], call))
        # The model's own and global hooks run around the session's call.
        vars(model)[CALL] = lambda *args, **kwargs: model.forward(*args, **kwargs)
        yield
    finally:
        vars(model).pop(CALL, None)
        for table, hooks in kept:
            _replace_hooks(table, hooks)


def _replace_hooks(table: dict[Any, Any], hooks: dict[Any, Any]) -> None:
    table.clear()
    table.update(hooks)


def _called(table: dict[Any, Any], path: str, call: Callable[..., Any]) -> dict[Any, Any]:
    def through(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *given: call(path, hook, module, given)

    return {number: hook if is_collecting(hook) else through(hook) for number, hook in table.items()}


def only_packages_hooks(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Disable the user's hooks inside the model, and the model's own hooks, for the body."""
    return hooks_replaced(model, lambda _, hook, module, given: hook(module, *given) if of_a_package(hook) else None)


@contextlib.contextmanager
def gradient_hooks_refused() -> Iterator[None]:
    """Refuse hooks on gradients inside a forward, and hooks on what autograd saves, which a graph cannot hold."""

    def refuse(name: str) -> Callable[..., Any]:
        def refused(tensor: torch.Tensor, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            raise CaptureError(
                f"the forward calls {name}() on a tensor (the hook {hook_name(hook)}), but the plan's backward would "
                "not call the hook. Do its work in a torch.autograd.Function, or remove it"
            )

        return refused

    enter = torch.autograd.graph.saved_tensors_hooks.__enter__

    def entered(hooks: Any) -> None:
        if keeps_another_value(hooks.pack_hook):
            raise CaptureError(f"the forward {SAVED_WORDS.format(hook_name(hooks.pack_hook))}")
        enter(hooks)

    with contextlib.ExitStack() as stack:
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, refuse(name)))
        stack.enter_context(mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__enter__", entered))
        for where, name in _SEEDS:
            stack.enter_context(mock.patch.object(where, name, _no_seed(name, getattr(where, name))))
        yield
