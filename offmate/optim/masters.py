"""Optimizers that update float32 copies of parameters of lower precision (master weights)."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..runtime.torch_names.modules import bare_step
from .chunks import may_be_cut, step_in_chunks
from .lone import lone
from .rows import works_by_element

MASTER = "master"


@functools.cache
def with_master_weights(kind: type[torch.optim.Optimizer]) -> Any:
    """Return a class of optimizers that do what `kind` does, on float32 copies of bfloat16 and float16 parameters.

    A copy is part of its parameter's state, under "master", next to moments in float32. It is saved, loaded and moved
    like any state. Float32 parameters are updated directly.

    Parameters
    ----------
    kind: a torch.optim class whose update is per parameter, such as `torch.optim.AdamW`.

    Returns: the class; it takes the same arguments as `kind`.
    """
    return type(f"{kind.__name__}WithMasters", (WithMasters, kind), {"_kind": kind, "__module__": kind.__module__})


def has_master(kind: type, param: torch.Tensor) -> bool:
    """Return whether a class of optimizers updates a float32 copy of this parameter."""
    return issubclass(kind, WithMasters) and param.dtype in (torch.bfloat16, torch.float16)


class WithMasters:
    """Mixin for an optimizer class, `_kind`; see `with_master_weights`.

    State: `factor`, by which the next step multiplies all gradients, None for 1.
    """

    _kind: Any
    param_groups: list[dict[str, Any]]
    state: dict[torch.Tensor, dict[str, Any]]
    factor: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; one with a master copy then takes the copy's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(group, param)
        return loss

    def _step_one(self, group: dict[str, Any], param: torch.Tensor) -> None:
        state = self.state[param]
        low = has_master(type(self), param)
        if low and MASTER not in state:
            state[MASTER] = param.detach().float()
        leaf = torch.nn.Parameter(state[MASTER] if low else param.data)
        own = {leaf: {k: v for k, v in state.items() if k != MASTER}}
        inner = lone(self._kind, self.__dict__, [{**group, "params": [leaf]}], own)
        if low and works_by_element(self._kind) and may_be_cut(param, leaf, own[leaf]):
            step_in_chunks(self._kind, inner, leaf, param, self.factor)
        else:
            if self.factor is not None:
                param.grad.mul_(self.factor)  # type: ignore[union-attr]
            leaf.grad = param.grad.float() if low else param.grad  # type: ignore[union-attr]
            bare_step(self._kind)(inner)
            if low:
                param.copy_(leaf)
        state.update(inner.state[leaf])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, keeping float32 tensors where torch would cast them to the parameter's dtype."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                    self.state[param][key] = value.clone()
