"""Gradients that the user assigns to planned parameters between iterations.

`torch.distributed.checkpoint` does that: it steps once with zero gradients so that the optimizer's states exist.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ProtocolError

_GRAD: Any = torch.Tensor.grad


class Assigned:
    """The parameters that hold a gradient which no backward of the plan has made.

    State: `params`. Changed on the training thread only.
    """

    def __init__(self) -> None:
        self.params: list[torch.nn.Parameter] = []

    def take(self, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Set a parameter's gradient."""
        _GRAD.__set__(param, value)
        self.params.append(param)

    def clear(self) -> None:
        """Remove the gradients."""
        for param in self.params:
            _GRAD.__set__(param, None)
        self.params.clear()

    def clear_one(self, param: torch.nn.Parameter) -> None:
        """Remove the gradient of one parameter, if it has one."""
        self.params = [one for one in self.params if one is not param]
        _GRAD.__set__(param, None)

    def check_none(self) -> None:
        """Raise ProtocolError if there are any: a backward of plain PyTorch would add to them."""
        if self.params:
            raise ProtocolError(
                f"{len(self.params)} parameters hold gradients that were assigned. Plain PyTorch would add to them, "
                "but the plan does not. Call optimizer.zero_grad() before the forward"
            )
