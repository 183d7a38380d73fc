"""Of tensors, of the storages behind them, and of parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

VERSION = "_version"
"""The attribute that `version_of` reads."""

version_of: Callable[[torch.Tensor], int] = operator.attrgetter(VERSION)
"""How often a tensor's memory was written in place; views count together. Publicly only autograd compares it."""

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""A number that no other storage alive has; `data_ptr` gives none for storages without memory, as fake ones are."""

StorageWeakRef = reductions.StorageWeakRef
"""Knows a storage without keeping it alive. Python's weak references end with the wrapper, before the storage does."""

has_expired: Callable[[int], Any] = torch.UntypedStorage._expired
"""Whether the storage behind a weak reference's `cdata` is gone; its method `expired` does the same, more slowly."""

storage_behind: Callable[[int], torch.UntypedStorage | None] = torch.UntypedStorage._new_with_weak_ptr
"""The storage behind a weak reference's `cdata`, None if it is gone; publicly a weak reference leads nowhere."""

gradient_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = operator.attrgetter("_backward_hooks")
"""A tensor's hooks on its gradient, in the order in which they are called; publicly they can only be added."""


def late_gradient_hooks(tensor: torch.Tensor) -> dict[int, Any] | None:
    """Give a leaf's hooks that are called once its gradient is added up; publicly they can only be added."""
    return getattr(tensor, "_post_accumulate_grad_hooks", None)


def as_class(values: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
    """Give a tensor of another class on the same memory; `Tensor.as_subclass` keeps its gradient's history."""
    return torch.Tensor._make_subclass(cls, values, False)


class ParameterByClass:
    """Mixed into classes of parameters: what `torch.nn.Parameter` makes of such a one is a plain parameter.

    It asks for an object of the same class and then marks that as a parameter; there is no public way to say no.
    """

    @property
    def _is_param(self) -> bool:
        """Not by this mark, but by its class."""
        return False

    @_is_param.setter
    def _is_param(self: Any, value: bool) -> None:
        self.__class__ = torch.nn.Parameter
