"""A test that an optimizer updates each parameter independently, made by letting it update tiny stand-ins."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch

from ..errors import OffmateError
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.modules import bare_step
from .lone import OWN, lone
from .masters import first_state

_STEPS = 3
_SIZES = (2, 3, 2, 3, 2, 3)
_REMEDY = "compile without optimizer= and call its step() yourself: gradients are then in .grad on the CPU"

_PLAIN = (torch.Tensor, bool, int, float, str, type(None))

Group = tuple[dict[str, Any], list[torch.Tensor]]


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise OffmateError if an optimizer's update of one parameter depends on anything but that parameter.

    Parameters
    ----------
    optimizer: its own parameters and state are not touched.
    """
    base: Any = type(optimizer)
    name = base.__name__
    closure = inspect.signature(base.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OffmateError(f"{name} calls the model again in the middle of an update (a closure); {_REMEDY}")
    _check_attributes(optimizer, name)
    groups = [_stand_ins(group) for group in optimizer.param_groups if group["params"]]
    random_state = torch.get_rng_state()
    try:
        together = _trained(optimizer, groups)
        drew = not torch.equal(random_state, torch.get_rng_state())
        alone = [one for hyper, tensors in groups for t in tensors for one in _trained(optimizer, [(hyper, [t])])]
    except OffmateError:
        raise
    except Exception as error:
        raise OffmateError(
            f"{name} cannot update a dense tensor by itself ({type(error).__name__}: {error}); {_REMEDY}"
        ) from error
    finally:
        torch.set_rng_state(random_state)
    if drew:
        raise OffmateError(f"{name} draws random numbers in its updates, and a plan changes their order; {_REMEDY}")
    if not all(map(_same, together, alone)):
        raise OffmateError(
            f"{name} combines parameters: updating two together gives other values than updating each alone, but a "
            f"plan updates each as soon as its gradient is ready; {_REMEDY}"
        )


def _check_attributes(optimizer: torch.optim.Optimizer, name: str) -> None:
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for key, value in optimizer.__dict__.items():
        if key in ("param_groups", "state"):
            continue
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.optim.Optimizer):
                raise OffmateError(f"{name} wraps another optimizer ({key}); pass the one inside, or {_REMEDY}")
            if id(leaf) in own:
                raise OffmateError(f"{name} holds parameters outside its groups ({key}); {_REMEDY}")


def _stand_ins(group: dict[str, Any]) -> Group:
    """Return a group's hyperparameters, and a tiny tensor for each number of dimensions and dtype; at least two."""
    hyper = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
    kinds = sorted({(p.dim(), p.dtype) for p in group["params"]}, key=str)
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(_SIZES[:dim], generator=generator).to(dtype) for dim, dtype in (*kinds, kinds[0])]
    return hyper, made


def _trained(optimizer: torch.optim.Optimizer, groups: list[Group]) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Return stand-ins after some steps of an optimizer that holds nothing else, each with its state.

    Raises: OffmateError if the optimizer keeps state besides that of its parameters.
    """
    base: Any = type(optimizer)
    leaves = [[torch.nn.Parameter(t.clone()) for t in tensors] for _, tensors in groups]
    own_groups = [{**hyper, "params": own} for (hyper, _), own in zip(groups, leaves)]
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for (hyper, _), own in zip(groups, leaves):
        state |= {leaf: first_state(base, hyper, leaf) for leaf in own}
    held = {k: v for k, v in optimizer.__dict__.items() if k not in OWN}
    single = lone(base, {k: copy.deepcopy(v) if _plain(v) else v for k, v in held.items()}, own_groups, state)
    before: dict[str, Any] = {}
    for step in range(_STEPS):
        for own in leaves:
            for leaf in own:
                leaf.grad = (leaf.detach() * (step + 1)).cos()
        bare_step(base)(single)
        now = _extras(single)
        # The first step may set an attribute once, for example after a check of devices.
        changed = [k for k, v in now.items() if step > 0 and not _equal(v, before.get(k))]
        before = now
        if changed:
            raise OffmateError(
                f"{base.__name__} keeps state that belongs to no single parameter ({changed[0]} changes in step()); "
                f"{_REMEDY}"
            )
    return [(leaf.detach(), single.state[leaf]) for own in leaves for leaf in own]


def _extras(single: Any) -> dict[str, Any]:
    """Return the attributes and hyperparameters that are plain data; no step may change them."""
    kept = {k: v for k, v in single.__dict__.items() if k not in ("param_groups", "state")}
    for index, group in enumerate(single.param_groups):
        kept |= {f"{key} of group {index}": value for key, value in group.items() if key != "params"}
    return {k: copy.deepcopy(v) for k, v in kept.items() if _plain(v)}


def _plain(value: Any) -> bool:
    return all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value))


def _equal(a: Any, b: Any) -> bool:
    first, second = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(first) == len(second) and all(map(_alike, first, second))


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a.nan_to_num(), b.nan_to_num())
    return bool(a == b)


def _same(a: tuple[torch.Tensor, dict[str, Any]], b: tuple[torch.Tensor, dict[str, Any]]) -> bool:
    first, second = ([leaf for leaf in pytree.tree_leaves(pair) if isinstance(leaf, _PLAIN)] for pair in (a, b))
    return _equal(first, second)
