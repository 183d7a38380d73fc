"""Who makes planned updates: the planner's choice, one side, or an earlier plan's split; the numbers are the same."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from typing import Any

import pytest
import torch

import offmate
from offmate import Config, InfeasibleBudget, OffmateError, Split
from offmate.optim.updater import Updater

from ...accelerator.loops import without_allocator
from ..loops import AMPLE, CPU_BUDGET, Loop, adamw, assert_same, batch, plain, tiny

UPDATES = ("auto", "host", "device")
ONE = Split(host=("first.weight", "layers.1.weight", "layers.1.bias"), device=("layers.0.weight", "last.bias"))


def settings(updates: Any = "auto", **more: Any) -> dict[str, Any]:
    return {"device": "emulated", "cpu_budget": CPU_BUDGET, "config": Config(cache_dir=None, updates=updates), **more}


@functools.cache
def planned(updates: Any, budget: int = AMPLE) -> offmate.Plan:
    model = tiny()
    return offmate.plan(model, budget, example_inputs=batch(0), optimizer=adamw(model), **settings(updates))


def trained(plan: offmate.Plan, updates: Any = "auto", steps: int = 3) -> Loop:
    """A loop that follows a plan, with plain PyTorch's numbers and the bytes that the plan says."""
    model = tiny()
    loop, reference = Loop(model, adamw(model)), plain()
    offmate.compile(model, plan.budget_bytes, optimizer=loop.optimizer, plan=plan, **settings(updates))
    assert loop.steps(0, steps) == reference.steps(0, steps)
    assert_same(loop, reference)
    assert model.offmate.peak_bytes == plan.predicted_peak_bytes
    return loop


@pytest.mark.parametrize("updates", ["host", "device", ONE])
def test_every_update_is_where_it_is_asked_for(updates: Any) -> None:
    """With room for anything, and with the least budget that works."""
    ample = planned(updates)
    for plan in (ample, planned(updates, ample.least_budget_bytes)):
        names = {name for name, _ in tiny().named_parameters()}
        assert {*plan.split.host, *plan.split.device} == names
        if updates == "host":
            assert plan.split.device == ()
        elif updates == "device":
            assert plan.split.host == ()
        else:
            assert plan.split.agrees(ONE) and ONE.joined(plan.split) == plan.split
        trained(plan, updates)


def test_each_setting_has_a_least_budget_and_a_plan_of_its_own() -> None:
    plans = {updates: planned(updates) for updates in UPDATES}
    assert len({plan.fingerprint for plan in plans.values()}) == 3
    assert plans["auto"].least_budget_bytes <= plans["host"].least_budget_bytes < plans["device"].least_budget_bytes


@pytest.mark.parametrize(("updates", "words"), [("device", "instead of updates='device'"), (None, "is fixed")])
def test_a_budget_that_only_another_split_fits_is_refused_in_words(updates: Any, words: str) -> None:
    updates = updates or planned("device").split
    budget = planned("host").least_budget_bytes
    with pytest.raises(InfeasibleBudget, match="the least that works is") as refused:
        planned(updates, budget)
    assert words in str(refused.value) and "Config(updates='auto')" in str(refused.value)
    assert refused.value.least_budget_bytes == planned(updates).least_budget_bytes
    planned(updates, refused.value.least_budget_bytes)


@pytest.mark.parametrize("gate", [{"max_grad_norm": 0.1}, {"accumulation_steps": 3}])
@pytest.mark.parametrize("updates", ["host", "device", ONE])
def test_behind_a_gate(updates: Any, gate: dict[str, Any]) -> None:
    model = tiny()
    optimizer = adamw(model)
    plan = offmate.plan(model, AMPLE, example_inputs=batch(0), optimizer=optimizer, **settings(updates), **gate)
    asked = updates if isinstance(updates, Split) else planned(updates).split
    assert plan.split.agrees(asked)
    budget = plan.least_budget_bytes * 11 // 10
    offmate.compile(model, budget, optimizer=optimizer, **settings(updates), **gate)
    micro = gate.get("accumulation_steps", 1)
    reference = plain()
    for step in range(3):
        for m in range(micro):
            for loop in (Loop(model, optimizer), reference):
                (loop.forward(step * micro + m) / micro).backward()
        if micro == 1:
            torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1)
        for loop in (Loop(model, optimizer), reference):
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert_same(Loop(model, optimizer), reference)
    assert model.offmate.plan.split.agrees(asked)
    assert model.offmate.peak_bytes == model.offmate.plan.predicted_peak_bytes


def test_an_earlier_plans_split_at_another_budget() -> None:
    tight = planned("auto", planned("auto").least_budget_bytes)
    assert tight.split.host and not planned("auto").split.host
    for budget in (AMPLE, 2 * planned(tight.split).least_budget_bytes):
        plan = planned(tight.split, budget)
        assert plan.split == tight.split
        trained(plan, tight.split)


def test_a_plan_with_the_split_that_is_pinned_is_followed() -> None:
    """Its fingerprint does not say so, since it was made with the split left open."""
    plan = planned("auto", 2 * planned("auto").least_budget_bytes)
    assert trained(plan, plan.split).model.offmate.plan is plan
    with pytest.raises(offmate.PlanFileError):
        trained(planned("auto"), planned("host").split)


def test_the_split_survives_files() -> None:
    split = planned(ONE).split
    assert Split.from_dict(json.loads(json.dumps(split.to_dict()))) == split
    assert hash(split) == hash(dataclasses.replace(split))


@pytest.mark.parametrize(
    ("host", "device", "error"),
    [(("a",), ("a", "b"), ValueError), ("a", (), TypeError), ((1,), (), TypeError), ((), None, TypeError)],
)
def test_what_is_no_split_is_refused(host: Any, device: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Split(host, device)


def test_splits_join_and_the_newer_one_counts() -> None:
    first, second = Split(("a", "b"), ("c",)), Split(("c",), ("b", "d"))
    assert not first.agrees(second) and first.agrees(Split(("a", "e"), ("d",)))
    assert first.joined(second) == Split(("a", "c"), ("b", "d"))


@pytest.mark.parametrize(
    ("updates", "optimizer", "words"),
    [("host", False, "needs optimizer="), (Split(("nobody",)), True, "names 1 parameters.*nobody")],
)
def test_a_setting_that_says_nothing_here_is_refused(updates: Any, optimizer: bool, words: str) -> None:
    model = tiny()
    with pytest.raises(OffmateError, match=words):
        offmate.compile(model, AMPLE, optimizer=adamw(model) if optimizer else None, **settings(updates))


# -- from one plan, and one run, to the next ------------------------------------------------------------------------


def other(step: int) -> dict[str, torch.Tensor]:
    """A larger batch than the others, with a plan of its own."""
    made = [batch(2 * step + k) for k in range(2)]
    return {name: torch.cat([one[name] for one in made]) for name in "xy"}


def biased(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Have one side's updates take so long."""
    cost = Updater.cost
    monkeypatch.setattr("offmate.profile.store._kept", {})
    monkeypatch.setattr(Updater, "cost", lambda *given: dataclasses.replace(cost(*given), **seconds))


def first_on_the_host_then_costly_there(device: str, monkeypatch: pytest.MonkeyPatch) -> Loop:
    """A loop that has had a plan for another shape when the device began to look better for updates."""
    model = tiny()
    loop = Loop(model, adamw(model))
    offmate.compile(model, AMPLE, optimizer=loop.optimizer, **settings(device=device))
    with monkeypatch.context() as patch:
        biased(patch, device_update_s=10.0)
        loop.steps(0, 2)
    assert not model.offmate.plan.split.device
    with monkeypatch.context() as patch:
        biased(patch, cpu_update_s=10.0)
        model(**other(0))["loss"].backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return loop


def test_on_the_emulated_device_every_plan_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = first_on_the_host_then_costly_there("emulated", monkeypatch).model.offmate
    assert not handle.plan.split.host
    assert handle.split == handle.plan.split


def test_on_an_accelerator_the_first_plans_split_is_kept(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers would change by the plan otherwise."""
    with without_allocator():
        loop = first_on_the_host_then_costly_there("sim", monkeypatch)
        assert len(loop.model.offmate.plans) == 2
        assert not loop.model.offmate.plan.split.device
        loop.session.residence.bring_home()
        loop.session.device.close()


def resumed(folder: Any, budget: int, updates: Any = "auto") -> Loop:
    model = tiny()
    loop = Loop(model, adamw(model))
    offmate.compile(model, budget, optimizer=loop.optimizer, **settings(updates))
    model.offmate.load_plans(folder)
    return loop


def test_a_resumed_run_keeps_the_split_at_another_budget(tmp_path: Any) -> None:
    tight = planned("auto", planned("auto").least_budget_bytes)
    first = trained(tight)
    first.model.offmate.save_plans(tmp_path)
    assert tight.split.host and not planned("auto").split.host
    loop = resumed(tmp_path, AMPLE)
    assert loop.steps(0, 3) == plain().steps(0, 3)
    assert loop.model.offmate.plan.split == first.model.offmate.split == tight.split
    asked = resumed(tmp_path, AMPLE, "device")
    asked.step(0)
    assert not asked.model.offmate.plan.split.host
    assert_same(loop, plain(steps=3))


def test_where_the_split_does_not_fit_the_emulated_device_takes_another(tmp_path: Any) -> None:
    first = trained(planned("device"), "device")
    first.model.offmate.save_plans(tmp_path)
    loop = resumed(tmp_path, planned("host").least_budget_bytes)
    assert loop.steps(0, 3) == plain().steps(0, 3)
    assert loop.model.offmate.plan.split.host


def test_where_it_does_not_fit_an_accelerator_refuses(sim: Any, tmp_path: Any) -> None:
    trained(planned("device"), "device").model.offmate.save_plans(tmp_path)
    model = tiny()
    loop = Loop(model, adamw(model))
    with without_allocator():
        budget = planned("host").least_budget_bytes
        offmate.compile(model, budget, optimizer=loop.optimizer, **settings(device="sim"))
        model.offmate.load_plans(tmp_path)
        with pytest.raises(InfeasibleBudget, match=r"is fixed.*a checkpoint's split"):
            loop.forward(0)
        loop.session.device.close()


def test_what_pins_the_split_is_known_before_the_first_batch(tmp_path: Any, caplog: Any) -> None:
    """So saving then does not lose it."""
    tight = planned("auto", planned("auto").least_budget_bytes)
    trained(tight).model.offmate.save_plans(tmp_path)
    loop = resumed(tmp_path, AMPLE)
    assert loop.model.offmate.split == tight.split != Split()
    loop.model.offmate.save_plans(tmp_path)
    again = resumed(tmp_path, AMPLE)
    assert again.model.offmate.split == tight.split
    assert resumed(tmp_path, AMPLE, ONE).model.offmate.split == tight.split.joined(ONE)
    names = [name for name, _ in tiny().named_parameters()]
    assert resumed(tmp_path, AMPLE, "device").model.offmate.split == Split(device=tuple(names))
    folder = tmp_path / "none"
    with caplog.at_level(logging.WARNING, logger="offmate"):
        fresh = resumed(folder, AMPLE)
    said = [record.getMessage() for record in caplog.records if record.name == "offmate"]
    assert said == [f"{folder} contains no plans and no split of updates, so everything is planned again"]
    assert fresh.model.offmate.split == Split()
    model = tiny()
    offmate.compile(model, tight.budget_bytes, optimizer=adamw(model), plan=tight, **settings())
    assert model.offmate.split == tight.split


def test_a_damaged_split_is_named(tmp_path: Any) -> None:
    trained(planned("auto")).model.offmate.save_plans(tmp_path)
    for text in ("{", "[]", "{}", '{"host": 3, "device": []}', "[" * 100_000):
        (tmp_path / "split.json").write_text(text)
        with pytest.raises(offmate.PlanFileError, match=r"split\.json.*Remove the file"):
            resumed(tmp_path, AMPLE)
