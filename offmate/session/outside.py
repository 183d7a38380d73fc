"""Gradients of planned parameters from outside the plan, such as those of a regulariser or an auxiliary head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ProtocolError
from ..runtime.replay.binding import HostState
from ..runtime.torch_names.autograd import after_backward
from ..runtime.torch_names.tensors import version_of
from .turns import Turns

_GRAD: Any = torch.Tensor.grad
_BY_ITSELF = "call backward() on that term of the loss by itself, after the model's"
_REMEDY = "Or put that term into the model's forward, or compile without optimizer=, where .grad holds the sum"


class Outside:
    """Finds gradients in the real `.grad` of planned parameters, which the plan does not read.

    They can be added as in plain PyTorch if updates wait for optimizer.step() and the order of the sums is known. This
    holds for those that came before the only planned backward of an update, and for one that came after its last.

    State: `_before`, the gradients that existed when an update's first planned backward began; `_mixed`, parameters
    that got one in the same backward() as the plan's. Changed on the training thread only.

    Parameters
    ----------
    names: names of the parameters. turns: know whether updates wait for optimizer.step().
    """

    def __init__(self, names: dict[torch.Tensor, str], turns: Turns) -> None:
        self._names, self._turns = names, turns
        self._before: dict[str, torch.Tensor] = {}
        self._mixed: set[str] = set()

    def _there(self) -> dict[str, torch.Tensor]:
        """Return the gradients that are in `.grad` now."""
        found = ((name, _GRAD.__get__(param)) for param, name in self._names.items())
        return {name: grad for name, grad in found if grad is not None}

    def clear(self) -> None:
        """Remove all of them, as zero_grad() does."""
        self._before.clear()
        self._mixed.clear()
        self._empty()

    def clear_one(self, param: torch.Tensor, name: str) -> None:
        """Remove that of one parameter."""
        self._before.pop(name, None)
        self._mixed.discard(name)
        _GRAD.__set__(param, None)

    def _empty(self) -> None:
        for param in self._names:
            _GRAD.__set__(param, None)

    def backward_begins(self, micro_batches: int) -> None:
        """Note that a planned backward is about to run, after `micro_batches` others of the same update.

        Raises: ProtocolError if there are gradients that could not be added as in plain PyTorch; none is then taken.
        """
        there = self._there()
        late = micro_batches > 0 or (there and self._before)
        if (there or self._before) and (late or not self._turns.gate):
            name = next(iter({**there, **self._before}))
            why = (
                "before or between the micro-batches of one update, and the sums would have another order"
                if self._turns.gate
                else "and updates begin during backward(), without it"
            )
            way = (
                "Call backward() on that term of the loss once, after the last micro-batch's backward()"
                if self._turns.gate
                else "To have it added, compile with max_grad_norm=float('inf'), which makes updates wait for the step"
            )
            raise ProtocolError(
                f"{name} has a gradient that does not come from the model's planned backward, {why}. This backward() "
                f"made no update; drop the gradient with zero_grad(). {way}. {_REMEDY}"
            )
        if there:
            self._before = there
            self._empty()
        after_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        # Autograd adds to `.grad` only after the plan's node, when it was empty. So what is there now came in the same
        # backward().
        self._mixed |= self._there().keys()

    @property
    def any(self) -> bool:
        """Return whether there are any gradients from outside."""
        return bool(self._before or self._there())

    def cannot_be_unscaled(self) -> ProtocolError:
        """Build the error for gradients that a scaler would unscale together with the plan's."""
        names = sorted({**self._before, **self._there()})
        return ProtocolError(
            f"{names[0]} has a gradient that does not come from the model's planned backward ({len(names)} parameters "
            "in all). With grad_scaler=, the plan's gradients are unscaled in backward(), before it could be added. No "
            f"update was made; drop the gradients with zero_grad(). {_REMEDY[3].upper() + _REMEDY[4:]}"
        )

    def take(self) -> list[dict[str, torch.Tensor]]:
        """Return those that optimizer.step() adds, in the order in which plain PyTorch would have added them.

        Raises: ProtocolError if the order is not known, or updates are made already; they are removed in any case.
        """
        before, mixed, after = self._before, self._mixed, self._there()
        self._before, self._mixed = {}, set()
        self._empty()
        late = [name for name, grad in after.items() if version_of(grad) or grad.requires_grad or grad.is_sparse]
        if not self._turns.gate:
            what = "but the updates of this step were made without it; the step is done"
            way = f"Compile with max_grad_norm=float('inf'), which makes updates wait for the step, and {_BY_ITSELF}"
        elif mixed:
            what = "made in the same backward() as the plan's, so the order of the sums is unknown; no update was made"
            way = _BY_ITSELF[0].upper() + _BY_ITSELF[1:]
        elif late:
            what = "made by several backward() calls, so the sums would have another order; no update was made"
            way = "Add these terms up and call backward() on the sum, once, after the model's"
        else:
            return [before, after]
        name = next(iter(late if not mixed and self._turns.gate else after))
        raise ProtocolError(
            f"{name} has a gradient that does not come from the model's planned backward ({len(after)} parameters in "
            f"all), {what}, and the gradients are dropped. {way}. {_REMEDY}"
        )


def add_up(host: HostState, gradients: list[dict[str, torch.Tensor]], like: Callable[..., torch.Tensor]) -> None:
    """Add gradients to the sums of an update that the host holds.

    Parameters
    ----------
    like: makes a host tensor with the layout of a given one.
    """
    with torch.no_grad():
        for found in gradients:
            for name, grad in found.items():
                if name in host.totals:
                    if host.grads[name].dtype != grad.dtype:  # autocast would have cast it before the sum
                        host.grads[name] = like(grad).copy_(host.grads[name])
                    host.grads[name].add_(grad)
                else:
                    host.grads[name] = like(grad).copy_(grad)
                    host.totals.add(name)
