"""Losses inside the model whose kernels reserve more than they return."""

from __future__ import annotations

import copy

import pytest
import torch

import offmate


class Regression(torch.nn.Module):
    """A tiny regression that returns its loss."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        self.loss = getattr(torch.nn.functional, loss)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net(x), y)


def losses_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("loss", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
def test_a_loss_that_reserves_more_than_it_returns_is_counted_as_it_is(loss: str) -> None:
    torch.manual_seed(0)
    model = Regression(loss)
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    expected = losses_of(plain, torch.optim.AdamW(plain.parameters(), fused=True), x, y)
    ours = torch.optim.AdamW(model.parameters(), fused=True)
    compiled = offmate.compile(model, "1MiB", optimizer=ours, device="emulated", config=offmate.Config(cache_dir=None))
    assert losses_of(compiled, ours, x, y) == expected
    assert compiled.offmate.peak_bytes == compiled.offmate.plan.predicted_peak_bytes
