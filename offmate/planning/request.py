"""What a plan is asked for, and what planning gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..capture.arrivals import Arrivals
from ..capture.export import Captured
from ..config import Config
from ..plans.plan import Plan
from ..runtime.replay.binding import Binding


@dataclass(frozen=True)
class Request:
    """What a plan is for, besides the model and the batch.

    Parameters
    ----------
    budget_bytes, host_budget_bytes: of device and host.
    device: kind of device. user_bytes: reserved for the user's code; None estimates it, as `user_factor` times what
        usual losses hold.
    automatic_host: the host budget is what is available now; a stored plan need only fit into it.
    micro_batches: how many forwards and backwards make one planned update. clips: whether gradients are clipped.
    margin_bytes: of the budget, left to the device's allocator.
    """

    budget_bytes: int
    host_budget_bytes: int
    device: str
    config: Config
    user_bytes: int | None = None
    user_factor: float = 1.0
    automatic_host: bool = False
    micro_batches: int = 1
    clips: bool = False
    margin_bytes: int = 0

    @property
    def gate(self) -> bool:
        """Whether updates wait until all gradients are complete."""
        return self.clips or self.micro_batches > 1


@dataclass(frozen=True)
class Prepared:
    """A captured model with its plan, ready to be replayed.

    Parameters
    ----------
    gradient_like: per output into which the user hands a gradient, a meta tensor laid out as that gradient.
    arrivals: of the gradients in plain PyTorch. keys: class of every block. structure: of the traced model, sizes left
        out; "" if nobody may follow.
    """

    captured: Captured
    plan: Plan
    binding: Binding
    gradient_like: dict[str, torch.Tensor]
    arrivals: Arrivals = field(default_factory=Arrivals)
    keys: tuple[str, ...] = ()
    structure: str = ""
