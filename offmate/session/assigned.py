"""Gradients that the user assigns to planned parameters between iterations, and the plain step with them.

`torch.distributed.checkpoint` does that: it steps once with zero gradients so that the optimizer's states exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import ProtocolError

if TYPE_CHECKING:
    from .session import Session

_GRAD: Any = torch.Tensor.grad


class Assigned:
    """Which parameters hold a gradient that no backward of the plan has made.

    State: `params`. Changed on the training thread only.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.params: list[torch.nn.Parameter] = []

    def take(self, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Give a parameter a gradient. Raises: ProtocolError in the middle of an iteration."""
        if self._session.in_iteration:
            raise ProtocolError(
                "a gradient was assigned to a parameter whose updates are planned, in the middle of an iteration; the "
                "plan would not see it. Compile without optimizer= to work on .grad"
            )
        self._session.bring_home()
        _GRAD.__set__(param, value)
        self.params.append(param)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update on the host as plain PyTorch does, by the optimizer's own step."""
        session = self._session
        assert session.updater is not None
        session.updater.base.step(optimizer)
        session.truth.adopt_states()

    def clear(self) -> None:
        """Take the gradients away."""
        for param in self.params:
            _GRAD.__set__(param, None)
        self.params.clear()

    def check_none(self) -> None:
        """Raise ProtocolError if there are any: a backward of plain PyTorch would add to them."""
        if self.params:
            raise ProtocolError(
                f"{len(self.params)} parameters hold gradients that were assigned; plain PyTorch would add to them, "
                "the plan does not. Call optimizer.zero_grad() before the forward"
            )
