"""Micro-batches of one update that use different parameters: totals and norms are plain PyTorch's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import offmate

from ..loops import CPU_BUDGET


class Routed(torch.nn.Module):
    """A branch that a batch takes or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if branch:
            h = h + torch.tanh(self.branch(h))
        return self.last(h).square().mean()


def built() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Routed()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def settings(micro: int, clip: float | None) -> dict[str, Any]:
    config = offmate.Config(cache_dir=None)
    return {
        "device": "emulated", "cpu_budget": CPU_BUDGET, "config": config, "accumulation_steps": micro,
        "max_grad_norm": clip,
    }  # fmt: skip


@functools.cache
def least(micro: int, clip: float | None) -> int:
    model, optimizer = built()
    example = {"x": torch.ones(4, 16), "branch": True}
    return offmate.plan(
        model, "1GiB", optimizer=optimizer, example_inputs=example, **settings(micro, clip)
    ).least_budget_bytes


def train(model: Any, optimizer: torch.optim.Optimizer, routes: str, clip: float | None) -> list[torch.Tensor]:
    """Train on one step per word of `routes`, one micro-batch per letter; T takes the branch, F does not."""
    seen: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for step in routes.split():
        for letter in step:
            loss = model(torch.randn(4, 16, generator=generator), letter == "T")
            seen.append(loss.detach().clone())
            (loss / len(step)).backward()
        if clip is not None and not hasattr(model, "offmate"):
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        if clip is not None and hasattr(model, "offmate"):
            seen.append(model.offmate.grad_norm.clone())
        optimizer.zero_grad()
    states = optimizer.state_dict()["state"]
    return [*seen, *(p.detach().clone() for p in model.parameters()), *(states[i]["exp_avg"] for i in sorted(states))]


@pytest.mark.parametrize("budget", ["ample", "least"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("routes", ["TF FF TT", "FT FF FT", "TFF FFT FTF FFF"])
def test_totals_and_norms(routes: str, clip: float | None, budget: str) -> None:
    micro = len(routes.split()[0])
    ours = built()
    offmate.compile(
        ours[0], "1GiB" if budget == "ample" else least(micro, clip), optimizer=ours[1], **settings(micro, clip)
    )
    expected, found = train(*built(), routes, clip), train(*ours, routes, clip)
    assert all(map(torch.equal, expected, found))
    assert ours[0].offmate.peak_bytes <= ours[0].offmate.plan.budget_bytes
