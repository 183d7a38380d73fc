"""What tells one optimizer from another in a plan: its code, its settings, and the state that it makes."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch

from ..guards.settings import is_simple
from .lone import OWN
from .updater import Updater

_SIZES = (2, 3, 2, 3, 2, 3)
# They change no bytes and no seconds.
_FREE = ("lr", "weight_decay")


def identity_of(updater: Updater) -> tuple[Any, ...]:
    """Return what the costs of an optimizer's updates depend on, as values whose `repr` is the same in every process.

    Numbers in hyperparameters count as zero or not, since they decide the state (momentum) but not its size. Those
    that schedulers add do not count.
    """
    optimizer = updater.optimizer
    groups = {name: _deciding(hyper, optimizer.defaults) for name, hyper in updater.groups.items()}
    # torch and its schedulers keep private attributes of their own there.
    shown = ((k, v) for k, v in optimizer.__dict__.items() if k not in OWN and not k.startswith("_"))
    attributes = sorted((k, repr(v)) for k, v in shown if is_simple(v))
    return _code_of(updater.base), updater.by_element, attributes, groups, _states(updater)


def _deciding(hyper: dict[str, Any], defaults: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for key, value in hyper.items():
        numbers = value if isinstance(value, (tuple, list)) else [value]
        numeric = all(isinstance(n, (int, float, torch.Tensor)) and not isinstance(n, bool) for n in numbers)
        if key in _FREE or (numeric and key not in defaults):
            continue
        found.append((key, str([bool(torch.as_tensor(n).any()) for n in numbers]) if numeric else str(value)))
    return sorted(found)


def _code_of(kind: Any) -> list[tuple[Any, ...]]:
    """Return the names and the code of a class and of its bases, as far as they are not torch's."""
    found: list[tuple[Any, ...]] = []
    for cls in kind.__mro__:
        if cls.__module__.partition(".")[0] in ("torch", "builtins"):
            found.append((cls.__module__, cls.__qualname__))
            continue
        methods = ((name, inspect.unwrap(getattr(it, "__func__", it))) for name, it in sorted(vars(cls).items()))
        code = [(name, _read(it.__code__)) for name, it in methods if isinstance(it, types.FunctionType)]
        found.append((cls.__module__, cls.__qualname__, code))
    return found


def _read(code: types.CodeType) -> tuple[Any, ...]:
    constants = [_read(one) if isinstance(one, types.CodeType) else _constant(one) for one in code.co_consts]
    return code.co_code.hex(), code.co_names, constants


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _states(updater: Updater) -> list[str]:
    """Return the state that an update of every kind of tensor makes, on tiny stand-ins."""
    kinds = {
        (str(sorted((k, str(v)) for k, v in hyper.items())), param.dim(), param.dtype): hyper
        for param, name in updater.names.items()
        for hyper in (updater.groups[name],)
    }
    found = []
    random_state = torch.get_rng_state()
    for (_, dim, dtype), hyper in kinds.items():
        state: dict[str, Any] = {}
        param, grad = (torch.ones(_SIZES[:dim], dtype=dtype) for _ in range(2))
        updater.step_one(hyper, param, grad, state)
        tensors = sorted((k, v.dtype, tuple(v.shape)) for k, v in state.items() if isinstance(v, torch.Tensor))
        found.append((dim, dtype, tensors))
    torch.set_rng_state(random_state)
    return sorted(set(map(repr, found)))
