"""Private names of tensors, of the storages behind them, and of parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

VERSION = "_version"
"""The attribute that `version_of` reads."""

version_of: Callable[[torch.Tensor], int] = operator.attrgetter(VERSION)
"""Returns how often a tensor's memory was written in place, all views counted; publicly only autograd compares it."""

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Returns a number that no other living storage has; `data_ptr` gives none for storages without memory (fake ones)."""

StorageWeakRef = reductions.StorageWeakRef
"""Knows a storage without keeping it alive. Python's weak references end with the wrapper, before the storage does."""

has_expired: Callable[[int], Any] = torch.UntypedStorage._expired
"""Returns whether the storage behind a weak reference's `cdata` is freed; the method `expired` is slower."""

storage_behind: Callable[[int], torch.UntypedStorage | None] = torch.UntypedStorage._new_with_weak_ptr
"""Returns the storage behind a weak reference's `cdata`, None if it is freed; there is no public way back to it."""

gradient_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = operator.attrgetter("_backward_hooks")
"""Returns a tensor's hooks on its gradient, in calling order; the public API can only add them."""


def late_gradient_hooks(tensor: torch.Tensor) -> dict[int, Any] | None:
    """Give a leaf's hooks that are called once its gradient is added up; the public API can only add them."""
    return getattr(tensor, "_post_accumulate_grad_hooks", None)


def as_class(values: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
    """Give a tensor of another class on the same memory; `Tensor.as_subclass` keeps its gradient's history."""
    return torch.Tensor._make_subclass(cls, values, False)


class ParameterByClass:
    """A mixin for classes of parameters, with which `torch.nn.Parameter` makes a plain parameter of an instance.

    `torch.nn.Parameter` asks for an object of the same class and then marks it as a parameter; no public switch
    prevents that.
    """

    @property
    def _is_param(self) -> bool:
        """Return False: its class makes it a parameter, not this mark."""
        return False

    @_is_param.setter
    def _is_param(self: Any, value: bool) -> None:
        self.__class__ = torch.nn.Parameter
