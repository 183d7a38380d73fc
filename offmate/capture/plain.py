"""A compiled model as it was before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Plainness:
    """What compiling a model hides: its class, and a forward of the instance's own, if it had one."""

    model_class: type[torch.nn.Module]
    forward: Callable[..., Any] | None

    @contextlib.contextmanager
    def of(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The compiled model, plain while this lasts."""
        compiled = type(model)
        params = {p: type(p) for p in model.parameters()}
        # Others put a forward on the instance: before, it is the one to run; since then, it leads here (accelerate's).
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
    """Have the model run this forward, for the body; one that others put on the instance comes back."""
    own = model.__dict__.get("forward")
    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = own
