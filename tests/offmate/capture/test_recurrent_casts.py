"""Recurrent layers under autocast: one copy of a weight for all time steps, and outputs of the right precision."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import offmate

from ..loops import CPU_BUDGET

STEPS = 5


class Recurrent(nn.Module):
    def __init__(self, *kinds: Any, **given: Any) -> None:
        super().__init__()
        width = 6 * (1 + given.get("bidirectional", False))
        self.layers = nn.ModuleList(kind(6 if i == 0 else width, 6, **given) for i, kind in enumerate(kinds))
        self.head = nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y, _ = layer(y)
        return (self.head(y).float() - x).pow(2).mean()


class Asked(Recurrent):
    """Computes with the outputs of the layer in float32, and in the precision that they have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (h, c) = self.layers[0](x)
        z = y.float() * 1.1 + 0.3
        return (z * x).mean() + torch.ones(6, dtype=h.dtype).mul(h).mul(1 / 3).sum().float() + c.float().div(3).sum()


def gradients(model: nn.Module, x: torch.Tensor, cached: bool) -> list[torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@functools.cache
def why_no_lstm() -> str:
    """Say why this processor runs no LSTM in bfloat16; empty if it does."""
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(6, 6)(torch.zeros(STEPS, 3, 6))
    except RuntimeError as error:
        return f"plain PyTorch runs no LSTM in bfloat16 on this processor: {error}"
    return ""


CASES = {
    "gru": Recurrent(nn.GRU),
    "rnn": Recurrent(nn.RNN, nonlinearity="relu"),
    "layers both ways": Recurrent(nn.GRU, num_layers=2, bidirectional=True),
    "lstm, gru and rnn": Recurrent(nn.LSTM, nn.GRU, nn.RNN),
    "lstm both ways": Recurrent(nn.LSTM, nn.GRU, bidirectional=True),
    "asked": Asked(nn.LSTM),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cached", [True, False])
def test_gradients_are_those_of_eager_mode(case: str, cached: bool) -> None:
    plain = copy.deepcopy(CASES[case])
    if any(isinstance(layer, nn.LSTM) for layer in plain.layers) and why_no_lstm():
        pytest.skip(why_no_lstm())
    ours = offmate.compile(
        copy.deepcopy(plain), "1GiB", device="emulated", cpu_budget=CPU_BUDGET, config=offmate.Config(cache_dir=None)
    )
    x = torch.randn(STEPS, 3, 6, generator=torch.Generator().manual_seed(1))
    found, expected = gradients(ours, x, cached), gradients(plain, x, cached)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


class Twice(Recurrent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.layers[0](x)
        return self.layers[0](y)[0].float().pow(2).mean()


def test_a_layer_that_runs_twice_in_one_region_is_refused() -> None:
    ours = offmate.compile(
        Twice(nn.GRU), "1GiB", device="emulated", cpu_budget=CPU_BUDGET, config=offmate.Config(cache_dir=None)
    )
    with pytest.raises(offmate.CaptureError, match=r"is used several times in one torch\.autocast region"):
        gradients(ours, torch.randn(STEPS, 3, 6), True)
