"""Optimizers that update float32 copies of parameters of lower precision (master weights)."""

from __future__ import annotations

import copyreg
import functools
from collections import defaultdict
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ArgumentTypeError
from ..runtime.replay.cast import MASTER as MASTER
from ..runtime.torch_names.modules import bare_step, state_at_construction
from ..runtime.torch_names.tensors import version_of
from .chunks import may_be_cut, step_in_chunks, take_over_edits
from .lone import lone
from .rows import works_by_element

# The version and the address that float32 copies had after the last step, or when they were loaded; by `note_copy`.
_left: MutableMapping[torch.Tensor, tuple[int, int]] = WeakTensorKeyDictionary()


@functools.cache
def with_master_weights(kind: type[torch.optim.Optimizer]) -> Any:
    """Return a class of optimizers that do what `kind` does, on float32 copies of bfloat16 and float16 parameters.

    A copy is part of its parameter's state, under "master", next to moments in float32. It is saved, loaded and moved
    like any state. Float32 parameters are updated directly. Edits of a parameter count: before the next update, its
    copy takes over the elements that no longer equal the rounded copy, and keeps the others in float32. If the copy
    itself was edited since the last step, the copy counts. A copy that replaces it counts as loaded.

    Parameters
    ----------
    kind: a torch.optim class that updates each parameter independently, such as `torch.optim.AdamW`.

    Returns: the class; it takes the same arguments as `kind`. Raises: ArgumentTypeError if `kind` is no such class.
    """
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        given = f"an optimizer ({type(kind).__name__})" if isinstance(kind, torch.optim.Optimizer) else repr(kind)
        raise ArgumentTypeError(
            f"with_master_weights is given {given}; it takes an optimizer's class, such as torch.optim.AdamW, and "
            "returns one: with_master_weights(torch.optim.AdamW)(model.parameters(), lr=1e-4)"
        )
    return type(f"{kind.__name__}WithMasters", (WithMasters, kind), {"_kind": kind, "__module__": kind.__module__})


def has_master(kind: type, param: torch.Tensor) -> bool:
    """Return whether a class of optimizers updates a float32 copy of this parameter."""
    return issubclass(kind, WithMasters) and param.dtype in (torch.bfloat16, torch.float16)


def first_state(kind: type, hyper: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return the state that an optimizer of a class has from its construction, in float32 next to a float32 copy.

    Parameters
    ----------
    hyper: hyperparameters of the parameter's group. param: its shape and dtype count.
    """
    like = torch.empty_like(param, dtype=torch.float32) if has_master(kind, param) else param
    return state_at_construction(kind, hyper, like)


def bare_kind(kind: Any) -> Any:
    """Return the class that a class of optimizers was made from to update float32 copies, or the class itself."""
    return getattr(kind, "_kind", kind)


def name_of(kind: type[torch.optim.Optimizer]) -> str:
    """Return an optimizer class's name; of one that updates float32 copies, that of the class it was made from."""
    return f"{kind._kind.__name__} on float32 copies" if issubclass(kind, WithMasters) else kind.__name__


class WithMasters:
    """Mixin for an optimizer class, `_kind`; see `with_master_weights`.

    State: `factor`, by which the next step multiplies all gradients, None for 1; `follows`, whether a step looks for
    edits of parameters, which a plan notices itself; `casts`, whether parameters take their copies' values after a
    step, which a plan may do later.
    """

    _kind: Any
    param_groups: list[dict[str, Any]]
    state: dict[torch.Tensor, dict[str, Any]]
    factor: torch.Tensor | None = None
    follows: bool = True
    casts: bool = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for group in self.param_groups:
            for param in group["params"]:
                if has_master(type(self), param) and self.state.get(param):
                    self.state[param] = first_state(type(self), group, param)

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
                    self._step_one(group, param, param.grad)
        return loss

    def _step_one(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        state = self.state[param]
        low = has_master(type(self), param)
        if low:
            self._find_copy(param, state)
        leaf = torch.nn.Parameter(state[MASTER] if low else param.data)
        own = {leaf: {k: v for k, v in state.items() if k != MASTER}}
        inner = lone(self._kind, self.__dict__, [{**group, "params": [leaf]}], own)
        if low and works_by_element(self._kind) and may_be_cut(param, grad, leaf, own[leaf]):
            step_in_chunks(self._kind, inner, leaf, param, grad, self.factor, casts=self.casts)
        else:
            if self.factor is not None:
                grad.mul_(self.factor)
            leaf.grad = grad.float() if low else grad
            bare_step(self._kind)(inner)
            if low and self.casts:
                param.copy_(leaf)
        state.update(inner.state[leaf])
        if low and self.follows:
            note_copy(state[MASTER])

    def _find_copy(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        """Make the copy of a parameter, or have it follow the user's edits."""
        if MASTER not in state:
            state[MASTER] = param.detach().float()
        elif self.follows and not was_written(state[MASTER]):
            take_over_edits(param.detach(), state[MASTER])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, keeping float32 tensors where torch would cast them to the parameter's dtype."""
        loaded: list[dict[str, Any]] = []
        optimizer: Any = self
        # Between the user's hooks: what they make of the state is loaded, and they see it whole.
        before = optimizer.register_load_state_dict_pre_hook(lambda _, given: loaded.append(given))
        after = optimizer.register_load_state_dict_post_hook(lambda _: self._keep_float32(loaded[-1]), prepend=True)
        try:
            super().load_state_dict(state_dict)  # type: ignore[misc]
        finally:
            before.remove()
            after.remove()

    def _keep_float32(self, loaded: dict[str, Any]) -> None:
        """Put a loaded state's float32 tensors in place of cast ones; moments next to a copy are always float32."""
        saved = [number for group in loaded["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params):
            own = self.state[param] if number in loaded["state"] else {}
            for key, value in loaded["state"].get(number, {}).items():
                if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                    continue
                if value.dtype == torch.float32:
                    own[key] = value.to(own[key].device, copy=True)
                elif has_master(type(self), param):
                    own[key] = own[key].float()
            note_copy(own.get(MASTER))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's classes expect the number of updates in every state that is not empty; a copy may be there before.
        given = state["state"]
        plain = {key: _without_copy(own) for key, own in given.items()}
        kept = {key: own for key, own in plain.items() if own or not given[key]}
        super().__setstate__({**state, "state": defaultdict(dict, kept)})  # type: ignore[misc]
        for key, own in given.items():
            if isinstance(own, dict) and MASTER in own:
                self.state[key][MASTER] = own[MASTER]
                note_copy(own[MASTER])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return *maker_of(type(self)), self.__getstate__()


def maker_of(kind: type) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and arguments that make an optimizer of a class without a state, for copies and pickles."""
    if issubclass(kind, WithMasters) and kind is with_master_weights(kind._kind):
        return _blank, (kind._kind,)  # pickle does not find this class by its name
    # Not by `__reduce_ex__` of an instance, which may be of a planned class by now.
    return copyreg._reconstructor, (kind, object, None)  # type: ignore[attr-defined]


def _blank(kind: type[torch.optim.Optimizer]) -> Any:
    """Make an optimizer that updates float32 copies, whose state is still to be set."""
    return object.__new__(with_master_weights(kind))  # type: ignore[arg-type]


def _without_copy(own: Any) -> Any:
    return {key: value for key, value in own.items() if key != MASTER} if isinstance(own, dict) else own


def note_copy(copy: Any) -> None:
    """Note that a float32 copy was stepped, loaded or made, so that what is written into it from now on counts."""
    if isinstance(copy, torch.Tensor):
        _left[copy] = _written(copy)


def was_written(copy: Any) -> bool:
    """Return whether a float32 copy was written into since the last step, or since it was loaded."""
    return isinstance(copy, torch.Tensor) and _left.get(copy) not in (None, _written(copy))


def _written(copy: torch.Tensor) -> tuple[int, int]:
    return -1 if copy.is_inference() else version_of(copy), copy.data_ptr()
