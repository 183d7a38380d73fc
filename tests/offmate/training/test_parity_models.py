"""Models of other shapes, loops of other kinds: the same numbers as plain PyTorch, inside the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ..parity import AMPLE, BUDGETS, LEAST, Batch, Case, check


def classes_loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(output, batch["y"])


def vector_batches(width: int = 24, rows: int = 32, classes: int = 5, n: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(rows, width, generator=generator),
            "y": torch.randint(0, classes, (rows,), generator=generator),
        }
        for _ in range(n)
    ]


def token_batches(length: int = 48, vocabulary: int = 40, n: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for _ in range(n):
        ids = torch.randint(2, vocabulary, (2, length), generator=generator)
        made.append({"ids": ids, "y": ids.roll(-1, 1)})
    return made


def vector_case(name: str, build: Callable[[], nn.Module], **more: Any) -> Case:
    """A model called with one tensor, whose loss is computed outside of it."""
    settings: dict[str, Any] = {"batches": vector_batches, "inputs": lambda b: (b["x"],), "loss": classes_loss}
    return Case(name, build, **(settings | more))


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.SiLU(),
        nn.LayerNorm(64), nn.Linear(64, 5),
    )  # fmt: skip


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


def pictures() -> list[Batch]:
    return [{"x": b["x"].reshape(8, 3, 16, 16), "y": b["y"]} for b in vector_batches(width=3 * 16 * 16, rows=8)]


class Decoder(nn.Module):
    """Residual blocks over tokens, with dropout and a head tied to the embedding if asked for."""

    def __init__(self, dropout: float = 0.0, tied: bool = False, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, width)
            )
            for _ in range(layers)
        )
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, 40, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.embed(ids))
        for layer in self.layers:
            hidden = hidden + self.drop(layer(hidden))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def token_case(name: str, build: Callable[[], nn.Module], **more: Any) -> Case:
    """A model that returns its loss."""
    settings: dict[str, Any] = {"batches": token_batches, "loss": lambda output, batch: output}
    return Case(name, build, **(settings | more))


class Detached(nn.Module):
    """A target branch under no_grad, as in self-distillation, that reads the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        with torch.no_grad():
            target = torch.sigmoid(self.second(hidden))
            scale = target.mean()
        hidden = torch.relu(self.second(hidden)) * target + scale
        return self.third(hidden)


class Mixed(nn.Module):
    """Reads integers, booleans and floats."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor, keep: torch.Tensor, weight: torch.Tensor, power: int = 2) -> torch.Tensor:
        hidden = self.embed(ids).masked_fill(~keep.unsqueeze(-1), 0.0) * weight.unsqueeze(-1).float()
        return self.out(torch.tanh(self.mix(hidden)) ** power).mean(1)


def mixed_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "ids": torch.randint(0, 40, (8, 12), generator=generator, dtype=torch.int32),
            "keep": torch.rand(8, 12, generator=generator) > 0.3,
            "weight": torch.rand(8, 12, generator=generator, dtype=torch.float64),
            "y": torch.randint(0, 5, (8,), generator=generator),
        }
        for _ in range(3)
    ]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    flat = [p for p in model.parameters() if p.dim() < 2]
    deep = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def frozen_but_last(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def frozen() -> nn.Module:
        model = build().requires_grad_(False)
        tensors = list(model.parameters())
        for tensor in [*tensors[-2:], tensors[len(tensors) // 2]]:
            tensor.requires_grad_(True)
        return model

    return frozen


def clipped(model: nn.Module) -> None:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm > 0.05


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    "case",
    [
        vector_case("sequential", perceptron),
        vector_case("convolutions", convolutions, batches=pictures),
        token_case("dropout", lambda: Decoder(dropout=0.2)),
        token_case("tied", lambda: Decoder(tied=True)),
        vector_case("no_grad", Detached),
        token_case("frozen", frozen_but_last(Decoder)),
    ],
    ids=lambda case: case.name,
)
def test_models(case: Case, budget: str, cache_dir: str) -> None:
    check(case, budget, cache_dir)


@pytest.mark.parametrize("budget", [AMPLE, LEAST])
@pytest.mark.parametrize(
    "case",
    [
        token_case("momentum", Decoder, optimizer=momentum),
        token_case("two_groups", Decoder, optimizer=two_groups),
        token_case("scheduler", Decoder, scheduler=decaying),
        token_case("halved", Decoder, loss=lambda output, batch: output / 2),
        token_case("gradients", Decoder, planned=False),
        token_case("clipped", Decoder, planned=False, before_step=clipped),
        token_case("accumulated", lambda: Decoder(dropout=0.1), planned=False, micro=2),
        vector_case(
            "mixed_batch", Mixed, batches=mixed_batches, inputs=lambda b: {k: v for k, v in b.items() if k != "y"}
        ),
    ],
    ids=lambda case: case.name,
)
def test_loops(case: Case, budget: str, cache_dir: str, two_threads: None) -> None:
    check(case, budget, cache_dir)
