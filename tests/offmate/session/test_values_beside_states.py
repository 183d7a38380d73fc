"""The CPU updates parameters that lie in files beside their states: plain PyTorch's numbers, whatever happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from offmate.solver.items import parameter
from offmate.solver.problem import Problem
from offmate.solver.schedule import Kind

import offmate

from ...runtime.storage.faulty import once
from . import test_state_storage
from .disks import broken, use_faulty_files
from .test_linked_states import check_checkpoints
from .test_state_storage import (
    KINDS,
    STEPS,
    assert_same,
    batch,
    check_failing,
    check_interrupt,
    check_spoilt,
    compiled,
    disk,
    made,
    one_cache,
    ring,
    small_requests,
    train,
)
from .test_state_storage import path as folder
from .test_updates_from_files import ByRow, few_layers_in_pieces

__all__ = ["few_layers_in_pieces", "folder", "one_cache", "ring", "small_requests"]  # fixtures

BUDGETS = {"gpu_budget": 1_100_000, "cpu_budget": 1_125_000}
RAM = {"adamw": 1_125_000, "amsgrad": 1_250_000, "masters": 850_000}


@pytest.fixture
def path(folder: offmate.StoragePath) -> offmate.StoragePath:
    return replace(folder, parameters=True)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values lie beside states wherever the CPU updates these from files, though RAM has room for them."""
    monkeypatch.setattr(Problem, "with_parameters_in_ram", property(lambda problem: problem))


def in_files(path: Any, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    """All updates are the CPU's, and RAM has no room for all values."""
    return compiled(path, **{**BUDGETS, "config": offmate.Config(updates="host"), **settings})


def check_in_files(model: Any, least_pieces: int = 2) -> None:
    """The values that the plan has in files take no RAM, and the others do."""
    host, schedule = model._offmate_session.truth.host, model.offmate.plan.schedule
    there = schedule.updated_from_files
    assert there and {item.name for item in schedule.trained_homes} == there
    assert any(len(schedule.states[name]) >= least_pieces for name in there)
    assert {name for name in host.params if host.stores(name)} == schedule.parameters_in_files == there
    for name, param in model.named_parameters():
        assert param.data_ptr() == host.params[name].data_ptr()


@pytest.mark.parametrize("kind", RAM)
def test_losses_weights_and_states_are_plain_pytorchs(path, kind):
    make, dtype = KINDS[kind]
    pair, plain = in_files(path, make=make, dtype=dtype, cpu_budget=RAM[kind]), made(make, dtype)
    assert train(*pair, range(STEPS), dtype) == train(*plain, range(STEPS), dtype)
    check_in_files(pair[0], 1)
    assert pair[0].offmate.plan.host_bytes <= RAM[kind]
    assert pair[0].offmate.peak_bytes <= BUDGETS["gpu_budget"]
    assert_same(pair, plain)
    for step in range(3, 6):
        assert train(*pair, range(step, step + 1), dtype) == train(*plain, range(step, step + 1), dtype)
        assert_same(pair, plain)
    check_in_files(pair[0], 1)


def test_with_paths_for_states_alone_it_does_not_fit(folder):
    with pytest.raises(offmate.InfeasibleBudget):
        train(*in_files(folder), range(1))


def test_values_in_bfloat16(path, always):
    make, dtype = KINDS["bf16"]
    pair, plain = in_files(path, make=make, dtype=dtype, cpu_budget=800_000), made(make, dtype)
    assert train(*pair, range(STEPS), dtype) == train(*plain, range(STEPS), dtype)
    check_in_files(pair[0], 1)
    assert_same(pair, plain)


def test_whole_tensors_of_other_optimizers(path, always, monkeypatch):
    """The ring then has room for the largest of them, and its values."""
    monkeypatch.setattr(test_state_storage, "LAYERS", 8)

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return ByRow(model.parameters())

    pair, plain = in_files(path, make=make, cpu_budget=2_800_000), made(make)
    assert train(*pair, range(STEPS)) == train(*plain, range(STEPS))
    check_in_files(pair[0], 1)
    assert all(len(states) == 1 for states in pair[0].offmate.plan.schedule.states.values())
    assert_same(pair, plain)


def test_as_many_bytes_are_read_and_written_as_planned(path):
    """No value leaves the device, and no more than the ring is in memory."""
    pair = in_files(path)
    train(*pair, range(2))
    check_in_files(pair[0])
    pair[0].offmate.sync()
    first, schedule = disk(pair[0]), pair[0].offmate.plan.schedule
    train(*pair, range(2, 6))
    pair[0].offmate.sync()
    read, written = pair[0].offmate.plan.stored_bytes
    now = disk(pair[0])
    ends = 2 * 4096 * 2 * sum(2 * len(schedule.states[name]) for name in schedule.states_in_files)
    assert 4 * read <= now.read_bytes - first.read_bytes <= 4 * (read + ends)
    assert 4 * written <= now.written_bytes - first.written_bytes <= 4 * (written + ends)
    values = {parameter(name) for name in schedule.updated_from_files}
    assert not any(action.kind is Kind.OFFLOAD and action.name in values for action in schedule.actions)
    slots = pair[0]._offmate_session.residence.active.executor._updates._ring._slots
    assert 0 < sum(slot._memory.numel() for slot in slots) <= schedule.ring_bytes + len(slots) * 3 * 2 * 4096
    assert "of states and parameters in files, which pass RAM" in pair[0].offmate.plan.explain()


@pytest.mark.parametrize(
    "settings", [{"max_grad_norm": 0.05}, {"accumulation_steps": 3}, {"accumulation_steps": 3, "max_grad_norm": 0.05}]
)
def test_behind_a_gate(path, always, settings):
    """With accumulation, the values are read again for every micro-batch."""
    pair, plain = in_files(path, cpu_budget=1_900_000, **settings), made()
    for step in range(2 * STEPS):
        for model, optimizer in (pair, plain):
            torch.manual_seed(step)
            model(batch(step))["loss"].backward()
            if (step + 1) % settings.get("accumulation_steps", 1) == 0:
                if "max_grad_norm" in settings and model is plain[0]:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
                optimizer.step()
                optimizer.zero_grad()
    check_in_files(pair[0])
    assert_same(pair, plain)


@pytest.mark.parametrize("per_pass", [None, 2])
def test_block_by_block(path, always, per_pass):
    config = offmate.Config(updates="host", accumulation_order="by block", micro_batches_per_pass=per_pass)
    pair = in_files(path, accumulation_steps=3, config=config, cpu_budget=1_700_000)
    plain, data = made(), [{"x": batch(step)} for step in range(9)]
    for model, optimizer in (pair, plain):
        torch.manual_seed(0)
        for i, inputs in enumerate(model.offmate.batches(data) if model is pair[0] else data, 1):
            (model(**inputs)["loss"] / 3).backward()
            if i % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    check_in_files(pair[0])
    assert_same(pair, plain)


def test_edits_between_steps_count(path):
    """The user may write to parameters and to states, and replace a parameter's memory."""
    pair, plain = in_files(path), made()
    for step in range(2 * STEPS):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        for model, optimizer in (pair, plain):
            for param in model.parameters():
                param.data.mul_(0.5)
                optimizer.state[param]["exp_avg"].mul_(2)
                if step == STEPS:
                    param.data = param.data * 1.5
    assert train(*pair, range(6, 8)) == train(*plain, range(6, 8))
    assert_same(pair, plain)


def test_writes_through_tensors_that_are_held_count_after_a_sync(path):
    pair, plain = in_files(path), made()
    train(*pair, range(2)), train(*plain, range(2))
    held = [[param.data for param in model.parameters()] for model, _ in (pair, plain)]
    for step in range(2, 5):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        pair[0].offmate.sync()
        for tensors in held:
            for tensor in tensors:
                tensor.mul_(0.5)
        pair[0].state_dict()
    assert train(*pair, range(5, 7)) == train(*plain, range(5, 7))
    assert_same(pair, plain)


def test_who_holds_memory_from_before_another_plan_is_warned(path, always, caplog):
    """Values that come back to RAM are in other memory, where a write through older references does not count."""
    pair = in_files(path, cpu_budget=1_250_000)
    train(*pair, range(2))
    before = pair[0].offmate.plan.schedule.parameters_in_files
    held = [param.data for param in pair[0].parameters()]
    with caplog.at_level("WARNING", "offmate"):
        pair[0].layers[0].weight.requires_grad_(False)
        train(*pair, range(2, 3))
    assert before - pair[0].offmate.plan.schedule.parameters_in_files
    assert "still hold memory that they had before" in caplog.text
    del held
    caplog.clear()
    train(*pair, range(3, 5))
    assert "still hold memory" not in caplog.text, "nobody holds any"


def test_parameters_that_share_one_storage_stay_in_ram(path, always):
    """None of them would free RAM by leaving, and whoever holds the storage may write to all of them."""

    def flat() -> tuple[Any, torch.optim.Optimizer, torch.Tensor]:
        model, optimizer = made()
        params = list(model.parameters())
        whole = torch.cat([param.data.flatten() for param in params])
        for param, part in zip(params, whole.split([param.numel() for param in params])):
            param.data = part.view(param.shape)
        return model, optimizer, whole

    (model, optimizer, held), (plain, plain_optimizer, plain_held) = flat(), flat()
    settings = {**BUDGETS, "cpu_budget": 2_000_000, "device": "emulated", "config": offmate.Config(updates="host")}
    model = offmate.compile(model, settings.pop("gpu_budget"), optimizer=optimizer, storage=path, **settings)
    for step in range(3):
        assert train(model, optimizer, range(step, step + 1)) == train(plain, plain_optimizer, range(step, step + 1))
        model.offmate.sync()
        for one in (held, plain_held):
            one.mul_(0.9)
    assert not model.offmate.plan.schedule.parameters_in_files
    assert_same((model, optimizer), (plain, plain_optimizer))


def test_evaluation_reads_the_new_values(path):
    pair, plain = in_files(path), made()
    for step in range(STEPS):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        losses = []
        for model, _ in (pair, plain):
            model.eval()
            with torch.no_grad():
                losses.append(model(batch(9))["loss"].item())
            model.train()
        assert losses[0] == losses[1]


def test_checkpoints_link_both_and_training_goes_on(path):
    check_checkpoints(in_files(path))


@pytest.mark.parametrize("number", [0, 15, 30, 45, 60])
def test_an_interrupt_loses_nothing(path, number):
    check_interrupt(in_files(path), number, steps=2)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("skipped", [0, 7, 23])
def test_a_failing_disk_is_named_and_leaves_no_silent_mixture(path, monkeypatch, call, skipped):
    faulty = use_faulty_files(monkeypatch)
    check_failing(in_files(path), faulty, call, once(broken, skipped))


def test_a_spoilt_file_ends_training_before_a_wrong_number(path, tmp_path):
    check_spoilt(in_files(path), tmp_path / "disk")


def test_a_plan_is_kept_with_its_homes(path, tmp_path):
    pair = in_files(path)
    train(*pair, range(1))
    pair[0].offmate.plan.save(tmp_path / "plan.json")
    again = offmate.load_plan(tmp_path / "plan.json")
    assert again.schedule == pair[0].offmate.plan.schedule
    assert again.schedule.parameters_in_files == again.schedule.updated_from_files
