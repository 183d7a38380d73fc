"""Which plan a call needs, asked without a loop around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offmate
from offmate.capture.plain import Plainness
from offmate.config import Config
from offmate.guards.watch import Watch
from offmate.machines.devices import make_device
from offmate.optim.updater import Updater, parameter_names
from offmate.planning.request import Request
from offmate.progress import planning_progress
from offmate.session.checkpoint_files import CheckpointFiles
from offmate.session.host_state import Truth
from offmate.session.maker import Maker
from offmate.session.preparer import Preparer
from offmate.session.state_storage import StateStorage
from offmate.session.user_code import UserCode
from offmate.session.variants import Variant

from ...fuzz.figures import from_hardware_file
from ..loops import AMPLE, CPU_BUDGET, adamw, batch, tiny


class Sliced(torch.nn.Module):
    """Reads a number that a graph cannot hold as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        return self.layer(x)[list(range(rows))].sum()


class Asking:
    """A preparer of a model's variants; `rooms`: how often it has had the device cleared."""

    def __init__(self, model: torch.nn.Module, given: offmate.Plan | None = None) -> None:
        self.model, self.rooms = model, 0
        request = Request(AMPLE, CPU_BUDGET, "emulated", Config(cache_dir=None))
        optimizer = adamw(model)
        updater = Updater(optimizer, parameter_names(model, optimizer))
        watch = Watch(model)
        truth, device = Truth(model, updater, watch), make_device(request.device, request.budget_bytes)
        user_code = UserCode(device.torch_device)
        maker = Maker(
            request,
            Plainness(type(model), None),
            watch,
            truth,
            device,
            updater,
            user_code,
            None,
            given,
            planning_progress,
            CheckpointFiles(truth.host, device.file_buffers_bytes, device.changed),
            StateStorage((), truth.host, device),
        )
        self.preparer = Preparer(maker, watch, truth, updater, user_code)

    def __call__(self, trains: bool = True, **kwargs: Any) -> tuple[Variant, list[torch.Tensor | None]]:
        call = self.preparer.call_of(self.model, (), kwargs, trains)
        return self.preparer.variant_for(self.model, call, self._make_room)

    def _make_room(self) -> None:
        self.rooms += 1


def test_room_is_made_for_new_plans_only():
    ask = Asking(tiny())
    given = batch(0)
    first, tensors = ask(**given)
    assert [a is b for a, b in zip(tensors, given.values(), strict=True)] == [True, True]
    assert (ask(**batch(1))[0], ask.rooms) == (first, 1)
    forward, _ = ask(trains=False, **batch(2))
    assert forward is not first and ask.rooms == 2
    assert ask.preparer.training is first and ask.preparer.plans == (first.prepared.plan,)


def test_plans_from_elsewhere_are_not_searched_for(monkeypatch):
    ask = Asking(tiny())
    plan = ask(**batch(0))[0].prepared.plan
    monkeypatch.setattr("offmate.planning.planner.solve_problem", lambda *_, **__: pytest.fail("solved anew"))
    given, earlier = Asking(tiny(), plan), Asking(tiny())
    earlier.preparer.maker.use_earlier(plan)
    assert given.preparer.plan is plan and earlier.preparer.plan is None
    for other in (given, earlier):
        assert other(**batch(0))[0].prepared.plan.schedule.actions == plan.schedule.actions


def test_a_call_without_weights_leaves_the_device_alone():
    with torch.device("meta"):
        ask = Asking(tiny())
    with pytest.raises(offmate.OffmateError, match="16 parameters are on the meta device"):
        ask(**batch(0))
    assert ask.rooms == 0 and ask.preparer.training is None


def test_whole_numbers_stay_numbers_and_each_value_is_captured_once():
    ask, x = Asking(Sliced()), torch.zeros(4, 4)
    found = [ask(x=x, rows=rows) for rows in (3, 2, 3)]
    assert [tensors for _, tensors in found] == [[x, None]] * 3
    assert found[2][0] is found[0][0] and found[1][0] is not found[0][0]


def test_a_forward_that_the_host_cannot_hold_is_refused_by_name():
    """It streams the parameters from the host. Training would need them there, too."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offmate.compile(
        model, AMPLE, optimizer=optimizer, device="emulated", cpu_budget="4KiB", config=Config(cache_dir=None)
    )
    with (
        pytest.raises(
            offmate.InfeasibleBudget, match=r"16\.2 KiB of parameters .* cpu_budget is 4 KiB; raise it to 16\.3"
        ),
        torch.no_grad(),
    ):
        model(torch.ones(2, 64))
    with pytest.raises(offmate.InfeasibleBudget, match="4 KiB of RAM is not enough"):
        model(torch.ones(2, 64))


def test_a_plan_with_a_larger_batchs_decisions_has_its_own_problem():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"optimizer": optimizer, "device": "emulated", "cpu_budget": "2GiB", "config": Config(cache_dir=None)}
    offmate.compile(model, AMPLE, **settings)
    plans = []
    for rows in (64, 8):
        model(torch.ones(rows, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        plans.append(model.offmate.plan)
    large, small = plans
    assert "larger batch" in small.status
    assert small.problem.groups == large.problem.groups and small.problem.rates == large.problem.rates
    assert sum(v.bytes for v in small.problem.values) < sum(v.bytes for v in large.problem.values)
    (point,) = offmate.sweep(small, [small.budget_bytes])
    assert point.predicted_peak_bytes <= small.predicted_peak_bytes * 1.01


@pytest.fixture
def rated_seconds():
    """Plans follow from a hardware file's rates, however busy the machine is."""
    with from_hardware_file():
        yield


def test_a_smaller_batch_behind_a_gate_keeps_the_update_phase_of_the_larger_one(rated_seconds):
    torch.manual_seed(0)
    models = [torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    settings = {"device": "emulated", "cpu_budget": "2GiB", "config": Config(cache_dir=None, updates="device")}
    given = {"optimizer": optimizers[0], "max_grad_norm": 0.1, **settings}
    least = offmate.plan(models[0], AMPLE, example_inputs=(torch.ones(16, 64),), **given).least_budget_bytes
    offmate.compile(models[0], 2 * least, **given)
    # A plan is made again where the first iteration held more than was reserved: the larger one settles first.
    for rows in (16, 16, 4, 4):
        for ours, model, optimizer in zip((True, False), models, optimizers):
            model(torch.ones(rows, 64)).pow(2).sum().backward()
            if not ours:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        plan = models[0].offmate.plan
    assert "larger batch" in plan.status and plan.problem.turn_around_steps > 3
    assert all(group.norm_s > 0 for group in plan.problem.groups)
    assert all(map(torch.equal, models[0].state_dict().values(), models[1].state_dict().values()))
