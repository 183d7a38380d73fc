"""A model's Python state as containers to search and values to compare: modules, attributes, and settings in them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..runtime.torch_names.modules import (
    BACKWARD_HOOKS,
    BUFFERS,
    FORWARD_HOOKS,
    MODULES,
    PARAMETERS,
    RECURRENT_WEIGHTS,
    TABLES,
)
from ..transformers_names import COLLECTING, HOOKS_INSTALLED
from .settings import class_settings, is_settings, is_simple, of_a_user, settings_of

# Attributes that torch gives every module; no forward reads them.
_STANDARD = frozenset(vars(torch.nn.Module())) - {"training"}
OWN = frozenset({"_offmate_session", "offmate", "forward"})
# Attributes without effect on a forward: one that transformers sets together with its hooks that only collect outputs,
# one that capture switches off anyway, and what recurrent layers keep about their own parameters.
_BOOKKEEPING = frozenset({HOOKS_INSTALLED, "gradient_checkpointing", *RECURRENT_WEIGHTS})

# Maps paths to values: of parameters, buffers, hooks and classes, and of attributes, whose paths begin with a dot.
Description = dict[str, Any]


class Same:
    """A stand-in for an object, equal by identity; where possible it does not keep that object alive."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, it: object) -> None:
        try:
            self._there: Any = weakref.ref(it)
        except TypeError:
            self._there = lambda: it

    def __eq__(self, other: object) -> bool:
        mine = self._there()
        return isinstance(other, Same) and mine is not None and mine is other._there()

    def __repr__(self) -> str:
        it = self._there()
        if isinstance(it, torch.Tensor):
            return f"a tensor of shape {tuple(it.shape)}"
        if callable(it) and hasattr(it, "__name__"):
            return str(it.__name__)
        return "an object that no longer exists" if it is None else f"a {type(it).__name__}"


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


def is_collecting(hook: Any) -> bool:
    """Return whether a hook is one of those with which transformers collects outputs inside its own forward."""
    return getattr(hook, "__module__", "") == COLLECTING


def _described(value: Any) -> Any:
    """Wrap a value so that it equals another one if a forward cannot tell them apart."""
    if isinstance(value, float | complex):
        return type(value), repr(value)
    return (type(value), value) if is_simple(value) else Same(value)


class Found:
    """Walks a model and everything that can be reached from it.

    State: the containers found, in the order of the walk; the description; `places`, the object and the name or key of
    every value by its whole path; `paths`, the path of every module by its identity.

    Parameters
    ----------
    model: its own hooks and forward are left out, since they run around what is captured. The model is not one of the
        containers either, so that keeping these does not keep it alive; `attributes_of` returns what it holds itself.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.holders: list[Any] = []
        self.tables: list[dict[Any, Any]] = []
        self.settings: list[dict[Any, Any]] = []
        self.rows: list[Any] = []
        self.odd: list[tuple[Any, str]] = []
        self.description: Description = {}
        self.places: dict[str, tuple[Any, Any]] = {}
        self.paths: dict[int, str] = {}
        self._root = model
        self._visited: set[int] = set()
        for path, module in model.named_modules(remove_duplicate=False):
            self.description[f"{path or 'the model'} is"] = Same(module)
            if id(module) not in self._visited:
                self._module(path, module)

    def _module(self, path: str, module: torch.nn.Module) -> None:
        self._visited.add(id(module))
        self.paths[id(module)] = path
        own, root = module.__dict__, module is self._root
        if not root:
            self.holders.append(module)
            self.tables.append(own)
            self.description[f"class of {path}"] = Same(type(module))
            self._class(path, type(module))
        self.tables += [own[name] for name in TABLES]
        self.description[f"order of the modules of {path}"] = tuple(own[MODULES])
        for name, param in own[PARAMETERS].items():
            known = None if param is None else (Same(param), param.requires_grad)
            self.description[f"parameter {path}.{name}"] = known
        for name, buffer in own[BUFFERS].items():
            self.description[f"buffer {path}.{name}"] = (
                buffer if buffer is None else (tuple(buffer.shape), buffer.dtype)
            )
        if not root:
            self._hooks(path, own)
        for name, value in own.items():
            if name not in _STANDARD and name not in _BOOKKEEPING and not (root and name in OWN):
                attribute = attribute_path(path, name)
                entries: Description = {}
                self.places[attribute] = (module, name)
                self._value(attribute, value, entries, 0)
                self.description[attribute] = entries

    def _class(self, path: str, cls: type) -> None:
        """Describe what users' classes hold for all their modules, such as a replaced forward or a number."""
        for base in cls.__mro__:
            if of_a_user(base) and id(base) not in self._visited:
                self._visited.add(id(base))
                found = class_settings(base)
                self.odd += [(base, name) for name, _ in found]
                known = {f"{base.__qualname__}.{name}": _described(value) for name, value in found}
                self.description[f"class {base.__qualname__} of {path}"] = known

    def _hooks(self, path: str, own: dict[str, Any]) -> None:
        for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS):
            self.tables.append(own[name])
            hooks = [Same(hook) for hook in own[name].values() if not is_collecting(hook)]
            if hooks:
                self.description[f"{name[1:].replace('_', ' ')} of {path}"] = hooks

    def _value(self, path: str, value: Any, entries: Description, depth: int) -> None:
        if is_simple(value) or id(value) in self._visited or not is_settings(value, depth):
            entries[path] = _described(value)
            return
        self._visited.add(id(value))
        entries[path] = type(value)
        if isinstance(value, torch.nn.Module):
            self._module(path.lstrip("."), value)
            return
        container, found = settings_of(value)
        if isinstance(container, dict):
            entries[f"order of {path}"] = tuple(map(repr, container))
        if isinstance(container, dict):
            self.tables.append(container)
            self.settings.append(container)
        elif container is not None:
            self.rows.append(container)
        else:
            self.odd += [(value, name) for name, _ in found]
        if container is not value:
            self.holders.append(value)
        for key, entry in found:
            inner = f"{path}[{key!r}]" if container is value else f"{path}.{key}"
            self.places[inner] = (value, key)
            self._value(inner, entry, entries, depth + 1)


def attributes_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes that a model holds itself, without those that compiling has added."""
    return {name: value for name, value in vars(model).items() if name not in OWN}


def attribute_path(module: str, name: str) -> str:
    """Return the path of a module's attribute in a description."""
    return f".{module}.{name}" if module else f".{name}"


def difference(before: Description, now: Description, counts: Callable[[str], bool] = lambda path: True) -> str:
    """Describe the first differences of two descriptions as text.

    Parameters
    ----------
    counts: tells whether the value at a path is compared.
    """
    listed = []
    for path in {**before, **now}:
        one, other = before.get(path, ABSENT), now.get(path, ABSENT)
        if not counts(path) or one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            listed.append(difference(one, other))
        elif isinstance(one, dict) or isinstance(other, dict):
            listed.append(f"{path.lstrip('.')} was {'added' if one is ABSENT else 'removed'}")
        else:
            words = f" was {_words(one)}, is {_words(other)}" if path.startswith(".") else ""
            listed.append(f"{path.lstrip('.')}{words}")
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _words(it: Any) -> str:
    if isinstance(it, tuple) and len(it) == 2 and isinstance(it[0], type):
        return str(it[1]) if it[0] in (float, complex) else repr(it[1])
    return repr(it)
