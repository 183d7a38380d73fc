"""What numpy writes into parameters, of which torch knows nothing, reaches float32 copies as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import offmate

from ...fuzz.figures import from_hardware_file

WIDTH, STEPS = 64, 4


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    with from_hardware_file():
        yield


def made() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))).to(torch.bfloat16)
    return model, offmate.with_master_weights(torch.optim.AdamW)(model.parameters(), lr=1e-2, fused=True)


def pairs(budget: str, **settings: Any) -> tuple[tuple[Any, torch.optim.Optimizer], ...]:
    model, optimizer = made()
    model = offmate.compile(model, budget, optimizer=optimizer, device="emulated", **settings)
    return (model, optimizer), made()


def write(model: torch.nn.Module) -> None:
    for param in model.parameters():
        param.detach().view(torch.int16).numpy()[...] ^= 1


def micro_batch(model: Any, step: int, rows: int = 16) -> float:
    inputs = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
    loss = model(inputs).float().square().mean()
    loss.backward()
    return loss.item()


def assert_same(pair: Any, plain: Any) -> None:
    theirs = plain[0].state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in pair[0].state_dict().items())
    own, others = (one[1].state_dict()["state"] for one in (pair, plain))
    assert all(torch.equal(own[n]["master"], state["master"]) for n, state in others.items())


@pytest.mark.parametrize("budget", ["1GiB", "200KB"])
def test_before_a_batch_of_another_shape(budget):
    """A plan is made for it meanwhile."""
    pair, plain = pairs(budget)
    for step in range(STEPS):
        losses = []
        for model, optimizer in (pair, plain):
            losses.append(micro_batch(model, step, rows=16 + 4 * step))
            optimizer.step()
            optimizer.zero_grad()
            write(model)
        assert losses[0] == losses[1]
    assert_same(pair, plain)


@pytest.mark.parametrize("budget", ["1GiB", "200KB"])
@pytest.mark.parametrize("micro_batches", [1, 2], ids=["short", "whole"])
@pytest.mark.parametrize("clipped", [False, True])
def test_between_the_last_backward_and_a_step_behind_a_gate(budget, micro_batches, clipped):
    settings = {"max_grad_norm": 0.01} if clipped else {}
    pair, plain = pairs(budget, accumulation_steps=2, **settings)
    for step in range(STEPS):
        losses = []
        for model, optimizer in (pair, plain):
            losses += [micro_batch(model, 2 * step + n) for n in range(micro_batches if step % 2 else 2)]
            if step % 2:
                write(model)
            if clipped and model is plain[0]:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        half = len(losses) // 2
        assert losses[:half] == losses[half:]
    assert_same(pair, plain)
