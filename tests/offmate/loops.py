"""A tiny residual model whose tightest plan moves everything there is to move, and plain PyTorch beside it."""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch

import offmate

AMPLE = 1 << 30
CPU_BUDGET = 1 << 30


class Tiny(torch.nn.Module):
    """Eight blocks; the loss is computed inside, the scores are returned too."""

    def __init__(self, layers: int = 6, width: int = 32) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.last = torch.nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x)
        for layer in self.layers:
            h = h + torch.nn.functional.gelu(layer(h))
        scores = self.last(h)
        return {"loss": torch.nn.functional.cross_entropy(scores, y), "scores": scores}


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {"x": torch.randn(8, 16, generator=generator), "y": torch.randint(0, 4, (8,), generator=generator)}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def plan(budget: str, planned: bool = True) -> offmate.Plan:
    """The plan for an "ample", "middle" or "least" budget; or for a "shared" one, where items share RAM."""
    return _planned(budget, planned)


@functools.cache
def _planned(budget: str, planned: bool) -> offmate.Plan:
    """Each plan is made once, however `plan` is called: measured seconds, and so schedules, differ between two."""
    model = tiny()
    settings: dict[str, Any] = {
        "example_inputs": batch(0),
        "optimizer": adamw(model) if planned else None,
        "device": "emulated",
        "cpu_budget": CPU_BUDGET,
        "config": offmate.Config(cache_dir=None),
    }
    if budget == "ample":
        return offmate.plan(model, AMPLE, **settings)
    least = plan("ample", planned).least_budget_bytes
    if budget == "shared":
        full_bytes = offmate.plan(model, 2 * least, **settings).host_bytes
        for part in (0.97, 0.88, 0.94, 0.91):  # which of them shares anything depends on measured seconds
            with contextlib.suppress(offmate.OffmateError):
                found = offmate.plan(model, 2 * least, **(settings | {"cpu_budget": int(part * full_bytes)}))
                if any(found.schedule.host_layout.neighbours.values()):
                    return found
        raise AssertionError("no plan shares RAM")
    return offmate.plan(model, least if budget == "least" else 2 * least, **settings)


@dataclass
class Loop:
    """A model with its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer

    def forward(self, step: int) -> torch.Tensor:
        return self.model(**batch(step))["loss"]

    def step(self, step: int) -> float:
        loss = self.forward(step)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def steps(self, first: int, end: int) -> list[float]:
        return [self.step(i) for i in range(first, end)]

    @property
    def session(self) -> Any:
        return self.model._offmate_session

    @property
    def executor(self) -> Any:
        return self.session.training.executor


def plain(steps: int = 0) -> Loop:
    model = tiny()
    loop = Loop(model, adamw(model))
    loop.steps(0, steps)
    return loop


def compiled(budget: str = "least", steps: int = 0, planned: bool = True, model: torch.nn.Module | None = None) -> Loop:
    model = model or tiny()
    optimizer = adamw(model)
    known = plan(budget, planned)
    offmate.compile(
        model,
        known.budget_bytes,
        optimizer=optimizer if planned else None,
        device="emulated",
        cpu_budget=known.schedule.host_budget_bytes,
        plan=known,
        config=offmate.Config(cache_dir=None),
    )
    loop = Loop(model, optimizer)
    loop.steps(0, steps)
    return loop


@functools.cache
def checkpoint(steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """States of model and optimizer after some steps of plain PyTorch."""
    loop = plain(steps)
    return loop.model.state_dict(), loop.optimizer.state_dict()


@functools.cache
def _shared(budget: str, planned: bool) -> Loop:
    return compiled(budget, planned=planned)


def trained(budget: str = "least", steps: int = 0, planned: bool = True) -> Loop:
    """A compiled loop after some steps; tests share it, so they leave it able to train."""
    loop = _shared(budget, planned)
    model, optimizer = copy.deepcopy(checkpoint(max(steps - 1, 0)))
    loop.model.load_state_dict(model)
    loop.optimizer.load_state_dict(optimizer)
    loop.optimizer.zero_grad()
    if loop.session.training is not None:
        loop.executor.on_action = None
    loop.steps(max(steps - 1, 0), steps)
    return loop


def tensors(loop: Loop) -> dict[str, torch.Tensor]:
    """Every parameter and every tensor of the optimizer's state, by name."""
    found = {name: value.clone() for name, value in loop.model.state_dict().items()}
    for index, state in loop.optimizer.state_dict()["state"].items():
        found |= {f"{index}/{key}": value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    return found


def assert_same(a: Loop, b: Loop) -> None:
    """Parameters and states of both are equal, bit for bit."""
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    differing = [name for name in first if not torch.equal(first[name], second[name])]
    assert not differing, differing
