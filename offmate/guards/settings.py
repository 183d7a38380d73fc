"""Python objects that hold settings which a forward may read, and the contents of these objects."""

from __future__ import annotations

import collections
import enum
import functools
import types
from typing import Any

import torch

MOST_ENTRIES = 1000  # per container; a larger one is data, such as a vocabulary
_DEEPEST = 8
_SIMPLE = (
    bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device, torch.layout, enum.Enum,
)  # fmt: skip
# Objects of these packages are machinery: changes of their contents mean nothing.
_MACHINERY = frozenset(
    ("torch", "numpy", "builtins", "logging", "threading", "weakref", "functools", "types", "inspect", "re", "random",
     "collections", "typing", "abc", "contextlib", "queue", "multiprocessing", "concurrent", "asyncio", "offmate",
     "tokenizers", "safetensors", "pathlib", "io", "_io", "operator", "itertools")
)  # fmt: skip

_LIBRARIES = frozenset(("transformers", "peft", "trl", "accelerate", "diffusers", "timm", "torchvision"))
_CODE = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType, types.ModuleType,
)  # fmt: skip


def is_simple(value: Any) -> bool:
    """Return whether a value is immutable and can be compared with `==`."""
    return isinstance(value, _SIMPLE) and (type(value) in _SIMPLE or isinstance(value, enum.Enum))


def is_settings(value: Any, depth: int) -> bool:
    """Return whether an attribute's value is a container of settings that is searched."""
    if depth >= _DEEPEST or isinstance(value, torch.Tensor):
        return False
    if isinstance(value, dict | list | tuple | set | frozenset | collections.deque):
        return len(value) <= MOST_ENTRIES
    if isinstance(value, torch.nn.Module | types.SimpleNamespace | functools.partial):
        return True
    if isinstance(value, _CODE):
        return False
    cls = value if isinstance(value, type) else type(value)
    if cls.__module__.partition(".")[0] in _MACHINERY:
        return False
    return isinstance(value, type) or isinstance(getattr(value, "__dict__", None), dict) or hasattr(cls, "__slots__")


def settings_of(value: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return the container that holds an object's settings, and its entries by key or attribute.

    Returns: None as the container of classes, objects with slots and partial functions, which have none.
    """
    if isinstance(value, dict):
        return value, list(dict.items(value))
    if isinstance(value, list | tuple | collections.deque):
        return value, list(enumerate(value))
    if isinstance(value, set | frozenset):
        return value, [(repr(entry), entry) for entry in sorted(value, key=repr)]
    if isinstance(value, type):
        return None, class_settings(value)
    if isinstance(value, functools.partial):
        return None, [(name, getattr(value, name)) for name in ("func", "args", "keywords")]
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        return own, list(own.items())
    names = [n for c in type(value).__mro__ for n in _slots(c) if hasattr(value, n)]
    return None, [(name, getattr(value, name)) for name in names]


def class_settings(cls: type) -> list[tuple[str, Any]]:
    """List the simple values and functions that a class holds for all its objects, without dunder names."""
    return [
        (name, value) for name, value in vars(cls).items()
        if not name.startswith("__") and (is_simple(value) or isinstance(value, types.FunctionType))
    ]  # fmt: skip


def of_a_user(cls: type) -> bool:
    """Return whether a class belongs to no library, so that its attributes may be set to something else."""
    return cls.__module__.partition(".")[0] not in _MACHINERY | _LIBRARIES


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
