"""The CPU updates parameters that lie in files beside their states: plain PyTorch's numbers, whatever happens."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from offmate.runtime.storage.engine import Engine
from offmate.solver.items import parameter
from offmate.solver.problem import Problem
from offmate.solver.schedule import Kind

import offmate
from offmate.session import state_storage

from ...runtime.storage.faulty import Faulty
from . import test_state_storage
from .test_linked_states import check_checkpoints
from .test_state_storage import (
    KINDS,
    STEPS,
    assert_same,
    batch,
    check_interrupt,
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
RAM = {"adamw": 1_125_000, "amsgrad": 1_320_000, "masters": 860_000}


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


def _fail(*_: Any) -> int:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("skipped", [0, 7, 23])
def test_a_failing_disk_is_named_and_leaves_no_silent_mixture(path, monkeypatch, call, skipped):
    """What is lost is said, training on it is refused, and what is loaded then is trained on exactly."""
    faulty = Faulty()
    monkeypatch.setattr(
        state_storage, "Engine", functools.partial(Engine, files=faulty, n_threads=2, request_bytes=1 << 14)
    )
    pair, plain = in_files(path), made()
    train(*pair, range(2)), train(*plain, range(2))
    left = [skipped]

    def later(real: Any, *given: Any) -> int:
        left[0] -= 1
        return _fail() if left[0] == -1 else real(*given)

    faulty.faults[call] = later
    with pytest.raises(offmate.StorageError, match="Input/output error"):
        train(*pair, range(2, 4))
        pair[0].offmate.sync()
    assert pair[0]._offmate_session.truth.torn
    with pytest.raises(offmate.OffmateError, match="Load a checkpoint"):
        train(*pair, range(4, 5))
    pair[0].load_state_dict(plain[0].state_dict())
    pair[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    assert train(*pair, range(2, 4)) == train(*plain, range(2, 4))
    assert_same(pair, plain)


def test_a_spoilt_file_ends_training_before_a_wrong_number(path, tmp_path):
    pair = in_files(path)
    train(*pair, range(2))
    pair[0].state_dict()
    for file in (tmp_path / "disk").glob("*.tensor"):
        with file.open("r+b") as handle:
            handle.seek(1000)
            byte = handle.read(1)
            handle.seek(1000)
            handle.write(bytes([byte[0] ^ 1]))
    with pytest.raises(offmate.StorageError, match="does not hold what was written"):
        train(*pair, range(2, 4))
    with pytest.raises(offmate.OffmateError, match="Load a checkpoint"):
        train(*pair, range(4, 5))


def test_a_plan_is_kept_with_its_homes(path, tmp_path):
    pair = in_files(path)
    train(*pair, range(1))
    pair[0].offmate.plan.save(tmp_path / "plan.json")
    again = offmate.load_plan(tmp_path / "plan.json")
    assert again.schedule == pair[0].offmate.plan.schedule
    assert again.schedule.parameters_in_files == again.schedule.updated_from_files
