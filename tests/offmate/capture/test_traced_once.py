"""A block is traced once per process, as long as nothing has changed that a trace depends on."""

from __future__ import annotations

import pytest
import torch

import offmate
from offmate.capture import joint

from ..loops import CPU_BUDGET, batch, tiny


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[joint.BlockSpec]:
    """The blocks that were traced, and not recalled."""
    own, seen = joint._trace, []
    monkeypatch.setattr(joint, "_kept", {})
    monkeypatch.setattr(joint, "_trace", lambda spec, *more: (seen.append(spec), own(spec, *more))[1])
    return seen


def plan(model: torch.nn.Module) -> offmate.Plan:
    settings = {"device": "emulated", "cpu_budget": CPU_BUDGET, "config": offmate.Config(cache_dir=None)}
    return offmate.plan(model, 1 << 30, example_inputs=batch(0), **settings)


def test_an_equal_model_is_not_traced_again(traces):
    first = plan(tiny())
    assert traces
    traces.clear()
    second = plan(tiny(seed=1))
    assert not traces
    assert first.schedule == second.schedule


def test_other_settings_of_torch_are_traced_anew(traces):
    plan(tiny())
    n_first = len(traces)
    torch.use_deterministic_algorithms(True)
    try:
        plan(tiny())
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(traces) == 2 * n_first


def test_so_many_traces_are_kept(traces, monkeypatch):
    monkeypatch.setattr(joint, "_MOST_KEPT", 1)
    plan(tiny())
    assert len(joint._kept) == 1


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Custom(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(Doubled.apply(self.layer(x)), y)


def test_what_a_function_of_the_models_own_does_is_always_looked_at(traces):
    plan(Custom())
    traces.clear()
    plan(Custom())
    assert traces
