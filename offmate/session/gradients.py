"""Gradients between autograd and the plan: those the user hands in, and those that land in `.grad`."""

from __future__ import annotations

from typing import Literal

import torch

from ..errors import ProtocolError
from ..planning.request import Prepared
from ..runtime.torch_names.autograd import backward_under_way, without_torch_function
from ..runtime.torch_names.tensors import gradient_hooks


def take_in(
    prepared: Prepared,
    grads: tuple[torch.Tensor | None, ...],
    device: torch.device,
    into: Literal["auto"] | tuple[str, ...] = "auto",
) -> dict[str, torch.Tensor]:
    """The gradients of the planned outputs, laid out as planned; zeros where autograd has none.

    Parameters
    ----------
    grads: per output of the binding, in order. device: where they are wanted. into: as `Config.gradients_into`.

    Returns: by output. Raises: ProtocolError if a gradient comes in for an output that was planned without one.
    """
    planned = {item.name for item in prepared.plan.schedule.computes["user"].makes}
    given = dict(zip(prepared.binding.outputs, grads))
    _check_planned(prepared, planned, given, into)
    _check_reached(prepared, planned, given)
    return {n: _as_planned(prepared.gradient_like[n], grad, device) for n, grad in given.items() if n in planned}


def _check_planned(
    prepared: Prepared,
    planned: set[str],
    grads: dict[str, torch.Tensor | None],
    into: Literal["auto"] | tuple[str, ...],
) -> None:
    """Raise ProtocolError if a gradient comes in that the plan has no place for."""
    unplanned = [name for name, grad in grads.items() if grad is not None and name not in planned]
    if unplanned:
        output = f"the output {_output_name(prepared, unplanned[0])!r}"
        grad = grads[unplanned[0]]
        if grad is not None and not grad.numel():
            raise ProtocolError(
                f"{output} has the shape {tuple(grad.shape)}, so it has no elements, and the plan has no place for its "
                "gradient. Leave such a batch out: skip backward() and optimizer.step()"
            )
        why = (
            f"{output}, which was planned without one (a scalar output is taken for the loss)"
            if into == "auto"
            else f"{output}, which Config(gradients_into={into!r}) leaves out"
        )
        raise ProtocolError(
            f"backward() hands a gradient into {why}. Compile with "
            f"config=offmate.Config(gradients_into={_used_names(prepared, grads)!r})"
        )


def _check_reached(prepared: Prepared, planned: set[str], grads: dict[str, torch.Tensor | None]) -> None:
    """Raise ProtocolError if parameters would get zeros where plain PyTorch gives them no gradient."""
    without = [name for name in planned if grads[name] is None]
    if not without:
        return
    reached = frozenset().union(*(prepared.captured.trains(name) for name in planned if grads[name] is not None))
    for name in without:
        left = sorted(prepared.captured.trains(name) - reached)
        if left:
            raise ProtocolError(
                f"backward() hands no gradient into the output {_output_name(prepared, name)!r}, so plain PyTorch "
                f"gives none to {left[0]} ({len(left)} parameters), but it was planned with one. Compile with "
                f"config=offmate.Config(gradients_into={_used_names(prepared, grads)!r}), or let the forward return "
                "what the loss uses"
            )


def _used_names(prepared: Prepared, grads: dict[str, torch.Tensor | None]) -> tuple[str, ...]:
    return tuple(sorted(_output_name(prepared, name) for name, grad in grads.items() if grad is not None))


def _output_name(prepared: Prepared, node: str) -> str:
    captured = prepared.captured
    return next(n for o, n in zip(captured.outputs, captured.output_names) if o == node)


def _as_planned(like: torch.Tensor, grad: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if grad is not None and (grad.stride(), grad.dtype, grad.device) == (like.stride(), like.dtype, device):
        return grad
    planned = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return planned.zero_() if grad is None else planned.copy_(grad)


def fed(
    parameters: tuple[tuple[str, torch.nn.Parameter], ...], graded: frozenset[str] | None
) -> dict[str, torch.nn.Parameter]:
    """The parameters that autograd is to know of.

    Parameters
    ----------
    graded: names of those that it is to get gradients for; None if it gets none, and hooks would be called without.
    """
    with without_torch_function():
        trained = {name: p for name, p in parameters if p.requires_grad}
        if graded is None:
            return {name: p for name, p in trained.items() if not gradient_hooks(p)}
        return {name: p for name, p in trained.items() if name in graded}


def alone_first(name: str, param: torch.nn.Parameter, address: int) -> None:
    """See that nothing was added up with a parameter's planned gradient before it in this backward().

    The planned gradient is a sum of its own where several operators read the parameter. Plain PyTorch adds them one by
    one to what came before, which is another sum; what comes after is added to the same one, in its memory.

    Parameters
    ----------
    address: of the planned gradient's memory.
    """
    task = backward_under_way()

    def check(grad: torch.Tensor) -> None:
        handle.remove()
        if backward_under_way() == task and grad.data_ptr() != address:
            raise ProtocolError(
                f"{name}, which the model reads in several places, gets a gradient from elsewhere in the same "
                "backward(), and plain PyTorch would make the sum in another order. The gradients of this backward() "
                "are not complete: drop them with zero_grad(). Call backward() on that term of the loss by itself, or "
                "put it into the model's forward"
            )

    # It has to see the sum before the user's hooks change it. Autograd calls them in the order of the plain dict.
    others = dict(gradient_hooks(param) or {})
    handle = param.register_hook(check)
    hooks = gradient_hooks(param)
    assert hooks is not None
    for key, hook in others.items():
        del hooks[key]
        hooks[key] = hook
