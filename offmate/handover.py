"""Gradients between autograd and the plan: those the user hands in, and those that land in `.grad`."""

from __future__ import annotations

import torch

from .errors import ProtocolError
from .request import Prepared


def take_in(
    prepared: Prepared, grads: tuple[torch.Tensor | None, ...], device: torch.device
) -> dict[str, torch.Tensor]:
    """The gradients of the planned outputs, laid out as planned; zeros where autograd has none.

    Parameters
    ----------
    grads: per output of the binding, in order. device: where they are wanted.

    Returns: by output. Raises: ProtocolError if a gradient comes in for an output that was planned without one.
    """
    planned = {item[2:] for item in prepared.plan.schedule.computes["user"].makes}
    gradients = {}
    for name, grad in zip(prepared.binding.outputs, grads):
        if name in planned:
            gradients[name] = _as_planned(prepared.gradient_like[name], grad, device)
        elif grad is not None:
            raise ProtocolError(_unplanned(prepared, name))
    return gradients


def _as_planned(like: torch.Tensor, grad: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if grad is not None and (grad.stride(), grad.dtype, grad.device) == (like.stride(), like.dtype, device):
        return grad
    planned = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return planned.zero_() if grad is None else planned.copy_(grad)


def _unplanned(prepared: Prepared, node: str) -> str:
    captured = prepared.captured
    names = [n for o, n in zip(captured.outputs, captured.output_names) if o == node]
    return (
        f"backward() hands a gradient into the output {names[0]!r}, which was planned without one (a scalar output "
        f"is taken for the loss). Compile with config=offmate.Config(gradients_into=({names[0]!r},))"
    )


def hand_out(model: torch.nn.Module, gradients: dict[str, torch.Tensor]) -> None:
    """Add gradients to `.grad`, as autograd does.

    Parameters
    ----------
    gradients: by parameter name.
    """
    params = dict(model.named_parameters())
    for name, grad in gradients.items():
        param = params[name]
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)
