"""Trained parameters that RAM has no room for lie in files: plain PyTorch's numbers, whatever the user does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from offmate.solver.decisions import TensorPlan
from offmate.solver.items import ItemKind, parameter
from offmate.solver.problem import Group, Problem
from offmate.solver.resources import HOST
from offmate.solver.rounding.sources import Sources
from offmate.solver.solution import GroupFlow

import offmate
from offmate.session.parameter_files import may_leave

from ...runtime.storage.faulty import once
from . import test_state_storage
from .disks import broken, flip_a_bit, full, use_faulty_files
from .test_state_storage import (
    STEPS,
    assert_same,
    batch,
    check_interrupt,
    check_refused,
    compiled,
    disk,
    made,
    one_cache,
    ring,
    small_requests,
    train,
)
from .test_state_storage import path as folder

__all__ = ["folder", "one_cache", "ring", "small_requests"]  # fixtures

BUDGETS: dict[str, Any] = {"gpu_budget": 1_200_000, "cpu_budget": 300_000}


@pytest.fixture
def path(folder: offmate.StoragePath) -> offmate.StoragePath:
    return replace(folder, parameters=True)


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_state_storage, "LAYERS", 4)


def in_files(path: Any, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    return compiled(path, **{**BUDGETS, **settings})


def check_stored(model: Any) -> None:
    """The parameters that the plan has in files take no RAM, and the others do."""
    session, schedule = model._offmate_session, model.offmate.plan.schedule
    assert schedule.trained_homes
    host = session.truth.host
    assert {name for name in host.params if host.stores(name)} == schedule.parameters_in_files
    for name, param in model.named_parameters():
        assert param.data_ptr() == host.params[name].data_ptr()


@pytest.mark.parametrize("updates", ["auto", "device"])
def test_losses_weights_and_states_are_plain_pytorchs(path, updates):
    pair, plain = in_files(path, config=offmate.Config(updates=updates)), made()
    assert train(*pair, range(STEPS)) == train(*plain, range(STEPS))
    check_stored(pair[0])
    assert pair[0].offmate.plan.host_bytes <= BUDGETS["cpu_budget"]
    assert pair[0].offmate.peak_bytes <= BUDGETS["gpu_budget"]
    assert_same(pair, plain)
    for step in range(STEPS, STEPS + 2):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        assert_same(pair, plain)
    check_stored(pair[0])


def test_with_paths_for_states_alone_it_does_not_fit(folder):
    with pytest.raises(offmate.InfeasibleBudget):
        train(*in_files(folder), range(1))


def test_as_many_bytes_are_read_and_written_as_planned(path):
    pair = in_files(path)
    train(*pair, range(2))
    first = disk(pair[0])
    train(*pair, range(2, 6))
    pair[0].offmate.plan.explain()
    read, written = pair[0].offmate.plan.stored_bytes
    now = disk(pair[0])
    ends = 4 * 2 * 4096 * 2 * len(pair[0].offmate.plan.schedule.homes)  # of what is not a multiple of a page
    assert 3 * read <= now.read_bytes - first.read_bytes <= 5 * read + ends
    assert 3 * written <= now.written_bytes - first.written_bytes <= 5 * written + ends


@pytest.fixture
def all_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the device updates leaves to files between its forward and its backward, though there is room."""

    def left(plan: TensorPlan, files: str) -> TensorPlan:
        if plan.device_update is None:
            return plan
        gaps = (replace(g, back=g.before - 1) if g.before - g.after > 2 else g for g in plan.gaps)
        out = plan.device_update + 1 if plan.out is None else plan.out
        return replace(plan, out=out, gaps=tuple(gaps), source=files)

    def choose(self: Sources, group: Group, flow: GroupFlow, plans: list[TensorPlan]) -> list[TensorPlan]:
        files = [tier for tier in flow.sources if tier != HOST]
        return [left(plan, files[0]) for plan in plans] if files else plans

    monkeypatch.setattr(Sources, "choose", choose)
    monkeypatch.setattr(Problem, "with_parameters_in_ram", property(lambda problem: problem))


@pytest.mark.parametrize("settings", [{"accumulation_steps": 3}, {"accumulation_steps": 3, "max_grad_norm": 0.05}])
def test_behind_a_gate(path, all_leave, settings):
    """With clipping and with accumulation, in which what left is read again for every micro-batch."""
    gpu_budget = 1_800_000 if "max_grad_norm" in settings else 1_850_000
    pair, plain = in_files(path, gpu_budget=gpu_budget, cpu_budget=600_000, **settings), made()
    for step in range(2 * STEPS):
        for model, optimizer in (pair, plain):
            torch.manual_seed(step)
            model(batch(step))["loss"].backward()
            if (step + 1) % settings["accumulation_steps"] == 0:
                if "max_grad_norm" in settings and model is plain[0]:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
                optimizer.step()
                optimizer.zero_grad()
    check_stored(pair[0])
    assert pair[0].offmate.peak_bytes <= gpu_budget
    assert_same(pair, plain)


def _in_place(param: torch.nn.Parameter) -> None:
    param.mul_(0.9)


def _through_data(param: torch.nn.Parameter) -> None:
    param.data.add_(0.01)


def _replaced(param: torch.nn.Parameter) -> None:
    param.data = torch.full(param.shape, 0.02)


@pytest.mark.parametrize("edit", [_in_place, _through_data, _replaced])
def test_edits_of_parameters_count(path, edit: Callable[[torch.nn.Parameter], None]):
    pair, plain = in_files(path), made()
    for step in range(3):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        with torch.no_grad():
            for model in (pair[0], plain[0]):
                for param in list(model.parameters())[step % 2 :: 2]:
                    edit(param)
    assert train(*pair, range(3, 5)) == train(*plain, range(3, 5))
    check_stored(pair[0])
    assert_same(pair, plain)


def test_a_forward_alone_moves_nothing_to_ram(path):
    pair, plain = in_files(path), made()
    train(*pair, range(2)), train(*plain, range(2))
    host = pair[0]._offmate_session.truth.host
    before = host.in_store
    for model in (pair[0], plain[0]):
        model.eval()
    with torch.no_grad():
        assert torch.equal(pair[0](batch(7))["x"].cpu(), plain[0](batch(7))["x"])
    assert host.in_store == before and before
    check_stored(pair[0])
    for model in (pair[0], plain[0]):
        model.train()
    assert train(*pair, range(2, 4)) == train(*plain, range(2, 4))
    assert_same(pair, plain)


def test_a_checkpoint_links_them_and_training_goes_on_in_other_files(path, tmp_path):
    pair, plain = in_files(path), made()
    train(*pair, range(2)), train(*plain, range(2))
    offmate.save_checkpoint(tmp_path / "step-2", *pair)
    saved = torch.load(tmp_path / "step-2" / "model.pt", weights_only=True)
    assert not saved.keys() & pair[0].offmate.plan.schedule.parameters_in_files
    assert train(*pair, range(2, 4)) == train(*plain, range(2, 4))
    assert_same(pair, plain)
    pair[0]._offmate_session.storage.close()
    plain = made()
    train(*plain, range(2))
    resumed = made()
    offmate.load_checkpoint(tmp_path / "step-2", *resumed)
    assert_same(resumed, plain)
    again = in_files(path)
    offmate.load_checkpoint(tmp_path / "step-2", *again)
    assert train(*again, range(2, 4)) == train(*plain, range(2, 4))
    check_stored(again[0])
    assert_same(again, plain)


def test_an_evaluation_before_the_first_step_is_as_large_as_the_model_that_was_loaded(path):
    pair, plain = in_files(path), made()
    with torch.no_grad():
        assert torch.equal(pair[0].eval()(batch(0))["loss"].cpu(), plain[0].eval()(batch(0))["loss"])
    for model in (pair[0], plain[0]):
        model.train()
    assert train(*pair, range(2)) == train(*plain, range(2))
    check_stored(pair[0])


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_spoilt_file_ends_training_before_a_wrong_number(path, evaluates):
    pair = in_files(path)
    train(*pair, range(2))
    session, schedule = pair[0]._offmate_session, pair[0].offmate.plan.schedule
    moved = min(item.name for item in schedule.trained_homes)
    store = session.truth.host.store
    session.residence.sync()
    files = store.bytes_of(session.truth.host.params[moved]).stored.files
    train(*pair, range(2, 3))
    for event in list(session.residence.active.executor._contents.written.values()):
        event.synchronize()
    if evaluates:
        pair[0].eval()
        with torch.no_grad():
            pair[0](batch(9))
        pair[0].train()
    for file in files:
        flip_a_bit(file, 0)
    check_refused(pair, range(3, 5))


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failing_disk_ends_training_by_name(path, monkeypatch, call):
    faulty = use_faulty_files(monkeypatch)
    pair = in_files(path)
    train(*pair, range(2))
    faulty.faults[call] = once(broken)
    with pytest.raises(offmate.StorageError, match="Input/output error"):
        train(*pair, range(2, 4))


@pytest.mark.parametrize("skip", [0, 2])
def test_a_full_disk_is_named_before_the_first_step(path, monkeypatch, skip):
    """No value is lost, whatever has moved before, and with room the next call goes on."""
    faulty = use_faulty_files(monkeypatch)
    pair, plain = in_files(path), made()
    faulty.faults["fallocate"] = once(full, skip)
    with pytest.raises(offmate.StorageError, match=r"too little space|No space left"):
        train(*pair, range(1))
    faulty.faults.clear()
    assert train(*pair, range(2)) == train(*plain, range(2))
    assert_same(pair, plain)


@pytest.mark.parametrize("number", [0, 15, 40, 60])
def test_an_interrupt_loses_nothing(path, number):
    check_interrupt(in_files(path), number, steps=1)


@pytest.mark.parametrize(
    ("call", "skip"), [("pwritev", 0), ("pwritev", 20), ("pwritev", 40), ("open", 0), ("open", 10)]
)
def test_a_disk_that_fails_after_a_checkpoint_leaves_no_mixture_unsaid(path, tmp_path, monkeypatch, call, skip):
    """States were read, so that what a checkpoint keeps is looked at again when the failed step is cleared away."""
    faulty = use_faulty_files(monkeypatch)
    pair = in_files(path)
    train(*pair, range(2))
    pair[1].state_dict()
    offmate.save_checkpoint(tmp_path / "saved", *pair)
    left = [skip]

    def from_then_on(real: Callable[..., Any], *args: Any) -> Any:
        left[0] -= 1
        return real(*args) if left[0] >= 0 else broken(real, *args)

    faulty.faults[call] = from_then_on
    with pytest.raises(offmate.StorageError, match="the iteration failed"):
        train(*pair, range(2, 3))
    faulty.faults.clear()
    assert pair[0]._offmate_session.truth.torn
    with pytest.raises(offmate.OffmateError, match="no checkpoint is written"):
        offmate.save_checkpoint(tmp_path / "mixed", *pair)
    offmate.load_checkpoint(tmp_path / "saved", *pair)
    plain = made()
    train(*plain, range(2))
    assert train(*pair, range(2, 4)) == train(*plain, range(2, 4))
    assert_same(pair, plain)


def test_older_memory_that_somebody_holds_is_warned_of(path, caplog):
    (model, optimizer) = made()
    held = [param.data for param in model.parameters()]
    model = offmate.compile(model, BUDGETS["gpu_budget"], optimizer=optimizer, device="emulated", storage=path,
                            cpu_budget=BUDGETS["cpu_budget"], config=offmate.Config())  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="offmate"):
        train(model, optimizer, range(1))
    assert "still hold memory that they had before" in caplog.text
    del held


def test_what_shares_memory_stays_in_ram():
    whole = torch.zeros(8, 4)
    apart, first, second = (torch.nn.Parameter(t) for t in (torch.zeros(4), whole[:4], whole[2:]))
    assert may_leave([("apart", apart)])
    assert not may_leave([("apart", apart), ("first", first), ("second", second)])
    assert not may_leave([("gaps", torch.nn.Parameter(whole[:, :2]))])
    assert may_leave([("apart", apart), ("frozen", torch.nn.Parameter(whole[:, :2], requires_grad=False))])
    assert may_leave([("apart", apart), ("empty", torch.nn.Parameter(torch.zeros(0)))])


def _sharing(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.stack((first, second))
    return whole[0], whole[1]


def _with_gaps(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat((first, first), dim=1)[:, : first.shape[1]], second


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (lambda *weights: weights, ""),
        (_sharing, "layers.0.weight shares its memory with another parameter"),
        (_with_gaps, "the memory of layers.0.weight has gaps between its elements"),
    ],
)
def test_parameters_that_cannot_lie_in_files_are_warned_of_once(path, stored, why, caplog):
    model, optimizer = made()
    pair = [layer.weight for layer in model.layers[:2]]
    for weight, memory in zip(pair, stored(*(weight.data for weight in pair))):
        weight.data = memory
    settings = {"optimizer": optimizer, "device": "emulated", "storage": path, "cpu_budget": 2**21}
    with caplog.at_level(logging.WARNING, logger="offmate"):
        offmate.plan(model, BUDGETS["gpu_budget"], example_inputs={"x": batch(0)}, **settings)
        planned = caplog.text
        caplog.clear()
        model = offmate.compile(model, BUDGETS["gpu_budget"], **settings)
        train(model, optimizer, range(2))
    for said in (planned, caplog.text):
        assert said.count("trained parameters stay in RAM") == bool(why)
        assert why in said


class WithEmpty(test_state_storage.Deep):
    """A model with a trained parameter that has no bytes, and that its forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))


@pytest.mark.parametrize("gpu_budget", [BUDGETS["gpu_budget"], 1 << 30], ids=["tight", "ample"])
def test_an_empty_parameter_is_nowhere(path, monkeypatch, gpu_budget):
    monkeypatch.setattr(test_state_storage, "Deep", WithEmpty)
    pair, plain = in_files(path, gpu_budget=gpu_budget), made()
    assert train(*pair, range(STEPS)) == train(*plain, range(STEPS))
    check_stored(pair[0])
    assert "empty" not in pair[0].offmate.plan.schedule.parameters_in_files
    assert_same(pair, plain)


def test_the_plan_says_what_is_stored(path, tmp_path):
    pair = in_files(path)
    train(*pair, range(1))
    plan = pair[0].offmate.plan
    kept = {item for item in plan.schedule.homes if item.kind is ItemKind.PARAMETER}
    assert kept == plan.schedule.trained_homes and kept <= set(map(parameter, plan.schedule.parameters_in_files))
    assert plan.read_bytes == 0
    used = sum(one.stored_bytes for one in pair[0].offmate.storage)
    assert used >= plan.schedule.bytes_in_files
    plan.save(tmp_path / "plan.json")
    assert offmate.load_plan(tmp_path / "plan.json").schedule == plan.schedule


def test_an_edit_counts_where_files_could_not_be_written_at_first(path, monkeypatch):
    """The float32 copies of weights that were replaced follow them, although the step after that failed."""
    make, dtype = test_state_storage.KINDS["masters"]
    budgets = {"gpu_budget": 1_300_000, "cpu_budget": 50_000}
    faulty, config = use_faulty_files(monkeypatch), offmate.Config(updates="device")
    pair, plain = compiled(path, make, dtype, **budgets, config=config), made(make, dtype)
    assert train(*pair, range(2), dtype) == train(*plain, range(2), dtype)
    for model in (pair[0], plain[0]):
        for param in model.parameters():
            param.data = torch.full_like(param, 0.02)
    faulty.faults["fallocate"] = once(full, 2)
    with pytest.raises(offmate.StorageError):
        train(*pair, range(2, 3), dtype)
    faulty.faults.clear()
    assert train(*pair, range(2, 5), dtype) == train(*plain, range(2, 5), dtype)
    assert_same(pair, plain)


@pytest.mark.parametrize("gaps", [False, True])
def test_a_plan_made_beforehand_is_for_the_model_that_is_compiled(path, gaps):
    """A parameter with gaps keeps all of them in RAM, in `offmate.plan` as in a compiled model."""

    def with_gaps() -> tuple[Any, torch.optim.Optimizer]:
        model, optimizer = made()
        weight = next(model.parameters())
        if gaps:
            weight.data = torch.stack([weight.data, weight.data], -1)[..., 0]
        return model, optimizer

    (model, optimizer), plain = with_gaps(), with_gaps()
    settings = {"optimizer": optimizer, "device": "emulated", "storage": path, "cpu_budget": 1 << 30}
    plan = offmate.plan(model, 1 << 30, example_inputs=(batch(0),), **settings)
    pair = offmate.compile(model, 1 << 30, plan=plan, **settings), optimizer
    assert train(*pair, range(2)) == train(*plain, range(2))
    assert_same(pair, plain)
