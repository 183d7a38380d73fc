"""Gradients between autograd and the plan: those of the outputs, and those that end up in `.grad`."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from ..capture.gradient_layouts import layout_of
from ..errors import ProtocolError
from ..planning.request import Prepared
from ..runtime.layouts import steps_of, without_repeats
from ..runtime.torch_names.autograd import backward_under_way, without_torch_function
from ..runtime.torch_names.tensors import gradient_hooks

log = logging.getLogger("offmate")

_warned: set[tuple[str, tuple[int, ...] | None]] = set()  # outputs and layouts of which a warning was given


def take_in(
    prepared: Prepared,
    grads: tuple[torch.Tensor | None, ...],
    device: torch.device,
    into: Literal["auto"] | tuple[str, ...] = "auto",
) -> dict[str, torch.Tensor]:
    """Return the gradients of the planned outputs, laid out as planned; zeros where autograd has none.

    Parameters
    ----------
    grads: per output of the binding, in order. device: where the gradients are needed. into: `Config.gradients_into`.

    Returns: the gradients by output. Raises: ProtocolError if an output that was planned without a gradient gets one,
    or if plain PyTorch would give some parameters none that were planned with one.
    """
    planned = {item.name for item in prepared.plan.schedule.computes["user"].makes}
    given = dict(zip(prepared.binding.outputs, grads))
    _check_planned(prepared, planned, given, into)
    _check_reached(prepared, planned, given)
    like = prepared.gradient_like
    return {
        n: _as_planned(like[n], grad, device, _output_name(prepared, n)) for n, grad in given.items() if n in planned
    }


def _check_planned(
    prepared: Prepared,
    planned: set[str],
    grads: dict[str, torch.Tensor | None],
    into: Literal["auto"] | tuple[str, ...],
) -> None:
    """Raise ProtocolError if there is a gradient for which the plan has no place."""
    unplanned = [name for name, grad in grads.items() if grad is not None and name not in planned]
    if unplanned:
        output = f"the output {_output_name(prepared, unplanned[0])!r}"
        grad = grads[unplanned[0]]
        if grad is not None and not grad.numel():
            raise ProtocolError(
                f"{output} has the shape {tuple(grad.shape)}, so it has no elements, and the plan has no place for its "
                "gradient. For such a batch, skip backward() and optimizer.step()"
            )
        why = (
            f"{output}, which was planned without one (by default, only the loss, a scalar output, gets one)"
            if into == "auto"
            else f"{output}, which Config(gradients_into={into!r}) leaves out"
        )
        raise ProtocolError(
            f"backward() passes a gradient to {why}. Compile with "
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
                f"backward() passes no gradient to the output {_output_name(prepared, name)!r}. Plain PyTorch would "
                f"then give none to {left[0]} ({len(left)} parameters), but the plan expects one. Compile with "
                f"config=offmate.Config(gradients_into={_used_names(prepared, grads)!r}), or let the forward return "
                "what the loss uses"
            )


def _used_names(prepared: Prepared, grads: dict[str, torch.Tensor | None]) -> tuple[str, ...]:
    return tuple(sorted(_output_name(prepared, name) for name, grad in grads.items() if grad is not None))


def _output_name(prepared: Prepared, node: str) -> str:
    captured = prepared.captured
    return next(n for o, n in zip(captured.outputs, captured.output_names) if o == node)


def _as_planned(like: torch.Tensor, grad: torch.Tensor | None, device: torch.device, name: str) -> torch.Tensor:
    """Return the gradient of an output in the planned layout; warn once of a layout that was not planned.

    Raises: ProtocolError if it does not repeat the elements that it was planned to repeat.
    """
    if grad is not None and (grad.stride(), grad.dtype, grad.device) == (like.stride(), like.dtype, device):
        return grad
    planned = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    if grad is None:
        without_repeats(planned, planned)[0].zero_()
        return planned
    repeated = [dim for dim, step in enumerate(like.stride()) if step == 0 and like.shape[dim] > 1]
    if any(grad.stride(dim) for dim in repeated):
        raise ProtocolError(
            f"gradient_layouts says that the gradient of {name!r} repeats one element along its dimensions {repeated}, "
            f"but it arrives with strides {grad.stride()}. Name the dimensions in the order in which the loss passes "
            "them"
        )
    if steps_of(like.shape, grad.stride()) != steps_of(like.shape, like.stride()):
        _warn_of_layout(name, grad)
    target, source = without_repeats(planned, grad)
    target.copy_(source)
    return planned


def _warn_of_layout(name: str, grad: torch.Tensor) -> None:
    layout = layout_of(grad)
    if (name, layout) in _warned:
        return
    _warned.add((name, layout))
    told = (
        "let the loss pass a dense one, for example with output.register_hook(torch.Tensor.contiguous)"
        if layout is None
        else f"compile with config=offmate.Config(gradient_layouts={{{name!r}: {layout}}})"
    )
    log.warning(
        "the gradient of the output %r arrives with strides %s, which were not planned, so it is copied. Sums over it "
        "may differ from plain PyTorch's in the last bits. For the same bits, %s",
        name, grad.stride(), told,
    )  # fmt: skip


def fed(
    parameters: tuple[tuple[str, torch.nn.Parameter], ...], graded: frozenset[str] | None
) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that autograd should know of.

    Parameters
    ----------
    graded: names of those for which autograd gets gradients; None if it gets none. Parameters with hooks are then left
        out, since the hooks would be called without a gradient.
    """
    with without_torch_function():
        trained = {name: p for name, p in parameters if p.requires_grad}
        if graded is None:
            return {name: p for name, p in trained.items() if not gradient_hooks(p)}
        return {name: p for name, p in trained.items() if name in graded}


def alone_first(name: str, param: torch.nn.Parameter, address: int) -> None:
    """Check that no other gradient comes before a parameter's planned gradient in the sum of this backward().

    If several operators read the parameter, the planned gradient is already a sum. Plain PyTorch would add its terms
    one by one to the earlier gradient, which rounds differently. A later gradient is added to the sum in its memory,
    as in plain PyTorch.

    Parameters
    ----------
    address: address of the planned gradient's memory.
    """
    task = backward_under_way()

    def check(grad: torch.Tensor) -> None:
        handle.remove()
        if backward_under_way() == task and grad.data_ptr() != address:
            raise ProtocolError(
                f"{name}, which the model reads in several places, also gets a gradient from outside the model in the "
                "same backward(), and plain PyTorch would add them in another order. The gradients of this backward() "
                "are incomplete: drop them with zero_grad(). Call backward() on that term of the loss by itself, or "
                "put it into the model's forward"
            )

    # This hook must see the sum before the user's hooks change it. Autograd calls hooks in the order of the dict.
    others = dict(gradient_hooks(param) or {})
    handle = param.register_hook(check)
    hooks = gradient_hooks(param)
    assert hooks is not None
    for key, hook in others.items():
        del hooks[key]
        hooks[key] = hook
