"""Updates before the gate on the simulated accelerator: whatever is late, everything comes after what it needs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import offmate

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
