"""A plan and its measurements belong to one optimizer: to its code, its settings, and the state that it makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offmate
from offmate.optim.identity import identity_of
from offmate.optim.updater import Updater

HOW: dict[str, Any] = {"device": "emulated", "cpu_budget": "2GiB"}


def own(heavy: bool) -> type[torch.optim.Optimizer]:
    """A class that has the same name either way, as an edited cell of a notebook has."""

    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any, momentum: bool = False) -> None:
            super().__init__(params, {"lr": 0.1})
            self.momentum = momentum

        if heavy:

            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for p in self.param_groups[0]["params"]:
                    p.sub_(self.state[p].setdefault("mean", torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=0.1)

        else:

            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for p in self.param_groups[0]["params"]:
                    if self.momentum:
                        p.sub_(self.state[p].setdefault("mean", torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=0.1)
                    else:
                        p.sub_(p.grad, alpha=0.1)

    return Own


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def planned(make: Any, cache_dir: str) -> offmate.Plan:
    model = layers()
    config = offmate.Config(cache_dir=cache_dir, updates="device")
    optimizer = make(model.parameters())
    return offmate.plan(model, "1MiB", optimizer=optimizer, example_inputs=(torch.ones(2, 16),), config=config, **HOW)


@pytest.mark.parametrize("heavy", [lambda p: own(True)(p), lambda p: own(False)(p, momentum=True)])
def test_another_optimizer_of_the_same_name_is_measured_anew(heavy: Any, tmp_path: Any) -> None:
    light = planned(own(False), str(tmp_path))
    plan = planned(heavy, str(tmp_path))
    assert not plan.from_cache and plan.least_budget_bytes > light.least_budget_bytes
    assert planned(own(False), str(tmp_path)).from_cache


def identity(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    names = {p: str(i) for i, p in enumerate(optimizer.param_groups[0]["params"])}
    return identity_of(Updater(optimizer, names))


def test_schedulers_change_nothing() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = identity(optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert identity(optimizer) == before


def test_what_makes_another_state_or_another_kernel_counts() -> None:
    params = list(layers().parameters())
    ways = [
        torch.optim.SGD(params, lr=0.1),
        torch.optim.SGD(params, lr=0.1, momentum=0.9),
        torch.optim.AdamW(params),
        torch.optim.Adam(params),
        torch.optim.AdamW(params, amsgrad=True),
        torch.optim.AdamW(params, fused=True),
    ]
    assert len({repr(identity(optimizer)) for optimizer in ways}) == len(ways)


def test_a_scheduler_made_between_plan_and_compile(cache_dir: str) -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(2, 16)
    settings: dict[str, Any] = {"optimizer": optimizer, "config": offmate.Config(cache_dir=cache_dir), **HOW}
    plan = offmate.plan(model, "1MiB", example_inputs=(batch,), **settings)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    offmate.compile(model, "1MiB", plan=plan, **settings)
    model(batch).sum().backward()
    optimizer.step()


class Growing(torch.optim.Optimizer):
    """Makes more state in its fourth update than in the ones before, which nobody can foresee."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["count"] = state.get("count", 0) + 1
            if state["count"] > 3:
                state["late"] = torch.zeros_like(p)
            p.sub_(p.grad, alpha=0.1)


def test_state_beyond_the_plan_is_refused_by_name(cache_dir: str) -> None:
    model, batch = layers(), torch.ones(2, 16)
    optimizer = Growing(model.parameters())
    config = offmate.Config(cache_dir=cache_dir, updates="device")
    offmate.compile(model, "1MiB", optimizer=optimizer, config=config, **HOW)
    with pytest.raises(offmate.BudgetExceeded, match=r"holds 1024 bytes of state for .*weight .*the plan counts 0"):
        for _ in range(5):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
