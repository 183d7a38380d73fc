"""Models whose code takes another path in an export than in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.offmate import parity


def is_torchdynamo_exporting() -> bool:
    """As transformers defines it; linear attention asks it in the module of its class."""
    return torch.compiler.is_exporting()


class Solving(nn.Module):
    """Solves a triangular system, or multiplies by its inverse in an export, as linear attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.values = nn.Linear(16, 12), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        system = self.rows(x) @ self.rows(x).transpose(1, 2) / 16
        if is_torchdynamo_exporting():
            inverse = torch.linalg.inv(system.tril(-1) + torch.eye(8))
            solved = inverse @ self.values(x)
        else:
            solved = torch.linalg.solve_triangular(system, self.values(x), upper=False, unitriangular=True)
        return {"loss": solved.square().mean()}


def _batches() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(seed))} for seed in range(5)]


CASE = parity.Case("solving", Solving, _batches, loss=lambda output, batch: output["loss"])


@pytest.mark.parametrize("budget", (parity.AMPLE, parity.LEAST))
def test_the_path_of_eager_mode_is_captured(budget: str) -> None:
    parity.check(CASE, budget, None)
