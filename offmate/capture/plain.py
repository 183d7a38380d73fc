"""Restores a compiled model temporarily to what it was before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Plainness:
    """The parts of a model that compiling hides: its class, and the instance's own forward, if it had one."""

    model_class: type[torch.nn.Module]
    forward: Callable[..., Any] | None

    @contextlib.contextmanager
    def of(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Make the compiled model plain inside the body."""
        compiled = type(model)
        params = {p: type(p) for p in model.parameters()}
        # Libraries may set a forward on the instance. One set before compiling is the one to run; one set afterwards
        # (by accelerate) calls the compiled model.
        around = model.__dict__.pop("forward", None)
        if self.forward is not None:
            model.__dict__["forward"] = self.forward
        model.__class__ = self.model_class
        for param in params:
            param.__class__ = torch.nn.Parameter
        try:
            yield model
        finally:
            model.__class__ = compiled
            model.__dict__.pop("forward", None)
            if around is not None:
                model.__dict__["forward"] = around
            for param, own in params.items():
                param.__class__ = own


@contextlib.contextmanager
def forward_replaced(model: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Make the model run this forward inside the body; afterwards restore one that was set on the instance."""
    own = model.__dict__.get("forward")
    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = own
