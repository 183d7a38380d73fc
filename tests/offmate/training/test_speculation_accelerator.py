"""Updates before the gate on the simulated accelerator: whatever is late, everything comes after what it needs."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch

import offmate
from offmate.plans.break_even import BreakEven

from ...accelerator.loops import on_sim
from ...fuzz.figures import from_hardware_file
from ...runtime.replay.order import watched
from ..loops import batch, plain
from .speculating import CONFIG, early

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("clip", [float("inf"), 0.3])
@pytest.mark.parametrize("percent", [100, None])
def test_delays_change_no_bits(sim: ModuleType, percent: int | None, clip: float, micro: int) -> None:
    config = offmate.Config(cache_dir=None, **CONFIG)
    settings = {"max_grad_norm": clip, "accumulation_steps": micro, "config": config}
    expected = plain()
    with (
        from_hardware_file(workspaces=True),
        watched(sim) as order,
        on_sim(percent, cache_dir=None, inputs=batch(0), **settings) as loop,
    ):
        sim.set_delays(1, 50)
        for step in range(8):
            order.workers_are_late = step > 4
            for one in (expected, loop):
                for m in range(micro):
                    (one.model(**batch(step * micro + m))["loss"] / micro).backward()
                if one is expected:
                    norm = torch.nn.utils.clip_grad_norm_(one.model.parameters(), clip)
                one.optimizer.step()
                one.optimizer.zero_grad()
            assert torch.equal(loop.model.offmate.grad_norm.cpu(), norm)
        sim.set_delays(0, 0)
        assert early(loop.model.offmate.plan.schedule)
        found = loop.model.state_dict()
        same = {name: torch.equal(value, found[name].cpu()) for name, value in expected.model.state_dict().items()}
    assert all(same.values()), same
    assert not order.races and not order.synchronized


def test_changing_between_plans_under_delays(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred steps of which half clip, in stretches, so that the plan changes there and back several times."""
    figures = BreakEven(gated_s=1.0, kept_s=0.8, missed_s=1.2, switch_s=0.0, log_bytes=0)
    monkeypatch.setattr("offmate.session.choice.break_even", lambda gated, early: figures)
    config, expected = offmate.Config(**{"cache_dir": None, **CONFIG, "speculate": "auto"}), plain()
    settings = {"max_grad_norm": 1.0, "config": config}
    with (
        from_hardware_file(workspaces=True),
        watched(sim) as order,
        on_sim(100, cache_dir=None, inputs=batch(0), **settings) as loop,
    ):
        sim.set_delays(1, 50)
        plans = []
        for step in range(200):
            order.workers_are_late = step % 3 == 0
            for one in (expected, loop):
                (one.model(**batch(step))["loss"] * (1e4 if step // 30 % 2 else 1e-3)).backward()
                if one is expected:
                    torch.nn.utils.clip_grad_norm_(one.model.parameters(), 1.0)
                one.optimizer.step()
                one.optimizer.zero_grad()
            plans.append(bool(early(loop.model.offmate.plan.schedule)))
        sim.set_delays(0, 0)
        found = loop.model.state_dict()
        same = {name: torch.equal(value, found[name].cpu()) for name, value in expected.model.state_dict().items()}
    assert sum(one != other for one, other in itertools.pairwise(plans)) >= 3
    assert all(same.values()), same
    assert not order.races and not order.synchronized
