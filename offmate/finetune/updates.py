"""The optimizer of a run: its class, its learning rate at every step, and fp32 copies where the model is bf16."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import OffmateError
from ..optimizer import Updater
from ..states import state_bytes
from .settings import Settings

_LEARNING_RATE, _LORA_LEARNING_RATE = 2e-5, 2e-4


def base_learning_rate(settings: Settings) -> float:
    """The learning rate after warm-up."""
    if settings.learning_rate is not None:
        return settings.learning_rate
    return _LEARNING_RATE if settings.lora is None else _LORA_LEARNING_RATE


def learning_rate(settings: Settings, step: int, n_steps: int) -> float:
    """The learning rate of one step; linear warm-up, then the schedule down to nearly zero at the last step."""
    base, warm = base_learning_rate(settings), settings.warmup_steps
    if step < warm:
        return base * (step + 1) / warm
    if settings.schedule == "constant":
        return base
    done = (step - warm) / max(1, n_steps - warm)
    return base * ((1 + math.cos(math.pi * done)) / 2 if settings.schedule == "cosine" else 1 - done)


class Updates:
    """A model's optimizer, and what surrounds its step.

    State: the optimizer's, and `masters`, an fp32 copy per trainable bf16 parameter in precision "bf16-master".
    """

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        self.model = model
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters: dict[str, torch.nn.Parameter] = {}
        if settings.precision == "bf16-master":
            low = {n: p for n, p in self.params.items() if p.dtype == torch.bfloat16}
            self.masters = {n: torch.nn.Parameter(p.detach().float()) for n, p in low.items()}
        self.max_grad_norm = settings.max_grad_norm
        self.planned, self.measures_norm = settings.planned_updates, bool(settings.gate.get("max_grad_norm"))
        self.optimizer = _optimizer([self.masters.get(n, p) for n, p in self.params.items()], settings)

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def step(self) -> float | None:
        """Clip, update and clear; returns the norm of all gradients, None where a plan has consumed them unmeasured."""
        norm = None
        if not self.planned:
            for name, master in self.masters.items():
                grad = self.params[name].grad
                master.grad = None if grad is None else grad.float()
                self.params[name].grad = None
            norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.params[name].copy_(master)
        return self.model.offmate.grad_norm.item() if self.measures_norm else norm

    def _clip(self) -> float:
        updated = [self.masters.get(n, p) for n, p in self.params.items()]
        if self.max_grad_norm is not None:
            return torch.nn.utils.clip_grad_norm_(updated, self.max_grad_norm).item()
        return torch.nn.utils.get_total_norm([p.grad for p in updated if p.grad is not None]).item()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and the fp32 copies."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": {name: master.detach() for name, master in self.masters.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Raises: OffmateError if it is of other parameters."""
        if state["masters"].keys() != self.masters.keys():
            raise OffmateError("the checkpoint's optimizer is of another model or precision")
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(state["masters"][name])

    def state_bytes(self) -> int:
        """What the states will take on disk and on the host, the copies included."""
        copies = sum(m.numel() * m.element_size() for m in self.masters.values())
        updated: dict[torch.Tensor, str] = {self.masters.get(n, p): n for n, p in self.params.items()}
        updater = Updater(self.optimizer, updated)
        return copies + sum(sum(state_bytes(updater, p, updater.groups[n])) for p, n in updated.items())


def _optimizer(params: list[torch.nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    if not params:
        raise OffmateError("the model has no parameter to train")
    lr, decay = base_learning_rate(settings), settings.weight_decay
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=lr, weight_decay=decay, fused=True)
    if settings.optimizer == "adam":
        return torch.optim.Adam(params, lr=lr, weight_decay=decay, fused=True)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(params, lr=lr, weight_decay=decay, momentum=0.9, fused=True)
    return torch.optim.Adafactor(params, lr=lr, weight_decay=decay)
