"""The optimizer of a run: its class, and its learning rate at every step."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import OffmateError
from ..optim.masters import with_master_weights
from ..optim.state_bytes import state_bytes
from ..optim.updater import Updater
from .settings import Settings

_LEARNING_RATE, _LORA_LEARNING_RATE = 2e-5, 2e-4


def base_learning_rate(settings: Settings) -> float:
    """Return the learning rate after warm-up."""
    if settings.learning_rate is not None:
        return settings.learning_rate
    return _LEARNING_RATE if settings.lora is None else _LORA_LEARNING_RATE


def learning_rate(settings: Settings, step: int, n_steps: int) -> float:
    """Compute the learning rate of a step: linear warm-up, then the schedule, down to nearly zero at the last step."""
    base, warm = base_learning_rate(settings), settings.warmup(n_steps)
    if step < warm:
        return base * (step + 1) / warm
    if settings.schedule == "constant":
        return base
    done = (step - warm) / max(1, n_steps - warm)
    return base * ((1 + math.cos(math.pi * done)) / 2 if settings.schedule == "cosine" else 1 - done)


class UpdateRule:
    """A model's optimizer with its learning rate, step and saved state.

    State: that of the optimizer; in precision "bf16-master" it includes an fp32 copy of every bf16 parameter.
    """

    def __init__(self, model: Any, settings: Settings) -> None:
        self.model = model
        self.params: dict[torch.Tensor, str] = {p: n for n, p in model.named_parameters() if p.requires_grad}
        self.measures_norm = settings.measures_norm
        self.optimizer = _optimizer(list(self.params), settings)

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def step(self) -> float | None:
        """Update and clear the gradients; return the norm of all gradients, None if nothing measured it."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.model.offmate.grad_norm.item() if self.measures_norm else None

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; its tensors become the optimizer's own."""
        # Optimizers may copy what they load, and RAM need not have room for mapped states.
        self.optimizer.load_state_dict({**state, "state": {}})
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        for number, own in state["state"].items():
            # A number of updates that stays in the mapping would keep a removed checkpoint on the disk.
            self.optimizer.state[params[number]] = {key: _kept(value) for key, value in own.items()}

    def state_bytes(self) -> int:
        """Return the bytes that the states will take on disk."""
        updater = Updater(self.optimizer, self.params)
        return sum(sum(state_bytes(updater, p, updater.groups[n])) for p, n in self.params.items())


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "adam": (torch.optim.Adam, {"fused": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "adafactor": (torch.optim.Adafactor, {}),
}


def _optimizer(params: list[torch.Tensor], settings: Settings) -> torch.optim.Optimizer:
    if not params:
        raise OffmateError("the model has no parameter to train")
    kind, more = _KINDS[settings.optimizer]
    if params[0].device.type == "meta":  # nothing will be updated, and torch has no fused kernel there
        more = {**more, "fused": False} if "fused" in more else more
    if settings.precision == "bf16-master":
        kind = with_master_weights(kind)
    return kind(params, lr=base_learning_rate(settings), weight_decay=settings.weight_decay, **more)
