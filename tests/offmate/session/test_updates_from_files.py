"""The CPU updates optimizer states that lie in files: plain PyTorch's numbers, whatever happens on the way."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offmate.solver.options import pieces
from offmate.solver.schedule import Kind

import offmate

from ...accelerator.loops import without_allocator
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
    path,
    ring,
    small_requests,
    stored_bytes,
    train,
)

__all__ = ["one_cache", "path", "ring", "small_requests"]  # fixtures

BUDGETS = {"gpu_budget": 1_100_000, "cpu_budget": 1_900_000}
RAM = {"adamw": 1_900_000, "amsgrad": 2_300_000, "bf16": 950_000, "masters": 1_450_000}


class ByRow(torch.optim.Optimizer):
    """An optimizer that does not treat elements independently: each row is scaled by its own mean square."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(param), torch.zeros_like(param)
                state["mean"].lerp_(param.grad, 0.1)
                state["square"].lerp_(param.grad.square(), 0.1)
                norm = state["square"].mean(dim=-1, keepdim=True).sqrt() + 1e-3
                param.sub_(group["lr"] * state["mean"] / norm)


@pytest.fixture(autouse=True)
def few_layers_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight's state is cut into three pieces, and there is no dropout, which a device draws in its own way."""
    monkeypatch.setattr(test_state_storage, "LAYERS", 4)
    monkeypatch.setattr(pieces, "_LEAST_BYTES", 1 << 17)


def from_files(path: Any, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    """All updates are the CPU's, and RAM has no room for all states."""
    return compiled(path, **{**BUDGETS, "config": offmate.Config(updates="host"), **settings})


def check_from_files(model: Any, least_pieces: int = 2) -> None:
    schedule = model.offmate.plan.schedule
    there = schedule.updated_from_files
    assert there and any(len(schedule.states[name]) >= least_pieces for name in there)
    stored_bytes(model)


@pytest.mark.parametrize("kind", RAM)
def test_losses_weights_and_states_are_plain_pytorchs(path, kind):
    make, dtype = KINDS[kind]
    pair, plain = from_files(path, make=make, dtype=dtype, cpu_budget=RAM[kind]), made(make, dtype)
    assert train(*pair, range(STEPS), dtype) == train(*plain, range(STEPS), dtype)
    check_from_files(pair[0], 1)
    assert pair[0].offmate.plan.host_bytes <= RAM[kind]
    assert pair[0].offmate.peak_bytes <= BUDGETS["gpu_budget"]
    assert_same(pair, plain)
    assert train(*pair, range(3, 5), dtype) == train(*plain, range(3, 5), dtype)
    assert_same(pair, plain)


def test_whole_tensors_of_other_optimizers(path, monkeypatch):
    """The ring then has room for the largest of them."""
    monkeypatch.setattr(test_state_storage, "LAYERS", 8)

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return ByRow(model.parameters())

    pair, plain = from_files(path, make=make, cpu_budget=3_300_000), made(make)
    assert train(*pair, range(STEPS)) == train(*plain, range(STEPS))
    schedule = pair[0].offmate.plan.schedule
    assert schedule.updated_from_files and all(len(schedule.states[n]) == 1 for n in schedule.updated_from_files)
    assert_same(pair, plain)


class Transposed(ByRow):
    """Like its parent, but its state is replaced at each update by one in another order of memory."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step(closure)
        for state in self.state.values():
            if state["mean"].dim() == 2:
                state["mean"] = state["mean"].mT.contiguous().mT


def test_states_that_an_optimizer_replaces(path, monkeypatch):
    """Their values go to the files in the order that is there."""
    monkeypatch.setattr(test_state_storage, "LAYERS", 8)

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return Transposed(model.parameters())

    pair, plain = from_files(path, make=make, cpu_budget=3_300_000), made(make)
    assert train(*pair, range(STEPS)) == train(*plain, range(STEPS))
    assert pair[0].offmate.plan.schedule.updated_from_files
    assert_same(pair, plain)


def test_a_state_that_the_user_replaces_before_the_step(path):
    """It goes to the files before its update."""
    settings = {"max_grad_norm": float("inf")}
    pair, plain = from_files(path, **settings), made()
    for step in range(STEPS):
        for model, optimizer in (pair, plain):
            torch.manual_seed(step)
            model(batch(step))["loss"].backward()
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"] * 0.5
            optimizer.step()
            optimizer.zero_grad()
    check_from_files(pair[0])
    assert_same(pair, plain)


class ByKey(ByRow):
    """Makes each part of its state where it is missing."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                for key in ("mean", "square"):
                    self.state[param].setdefault(key, torch.zeros_like(param))
        super().step(closure)


def _late(write: Callable[..., int], *given: Any) -> int:
    time.sleep(0.02)
    return write(*given)


def test_the_second_update_comes_while_the_first_is_being_written(path, sim, ring, monkeypatch):
    """It reads what the first one has made, however slow the drive is."""
    monkeypatch.setattr(test_state_storage, "LAYERS", 8)
    faulty = use_faulty_files(monkeypatch)
    faulty.faults["pwritev"] = _late
    with without_allocator():

        def make(model: torch.nn.Module) -> torch.optim.Optimizer:
            return ByKey(model.parameters())

        plain = made(make)
        pair = from_files(path, make=make, device="sim", cpu_budget=3_300_000 + 6 * (1 << 14))
        assert train(*pair, range(STEPS)) == train(*plain, range(STEPS))
        assert pair[0].offmate.plan.schedule.updated_from_files
        assert_same(pair, plain)
        pair[0]._offmate_session.device.close()


def test_as_many_bytes_are_read_and_written_as_planned(path):
    """Nothing is read for the first update, nothing crosses the link, and no more than the ring is in memory."""
    pair = from_files(path)
    train(*pair, range(1))
    check_from_files(pair[0])
    read, written = stored_bytes(pair[0])
    first, schedule = disk(pair[0]), pair[0].offmate.plan.schedule
    assert first.read_bytes == 0
    train(*pair, range(1, 4))
    pair[0].offmate.sync()
    ends = 2 * 4096 * 2 * sum(len(schedule.states[name]) for name in schedule.states_in_files)
    assert 3 * read <= disk(pair[0]).read_bytes <= 3 * (read + ends)
    assert 4 * written <= disk(pair[0]).written_bytes <= 4 * (written + ends)
    states = {item for name in schedule.updated_from_files for item in schedule.states[name]}
    assert not states & {a.name for a in schedule.actions if a.kind in (Kind.PREFETCH, Kind.OFFLOAD)}
    slots = pair[0]._offmate_session.residence.active.executor._updates._ring._slots
    held = sum(slot._memory.numel() for slot in slots)
    assert 0 < held <= schedule.ring_bytes + len(slots) * 2 * 2 * 4096


@pytest.mark.parametrize(
    "settings",
    [{"max_grad_norm": 0.05}, {"accumulation_steps": 3, "cpu_budget": 2_200_000},
     {"max_grad_norm": 0.05, "config": offmate.Config(updates="host", speculate=True), "cpu_budget": 1_800_000}],
)  # fmt: skip
def test_behind_a_gate(path, settings):
    pair, plain = from_files(path, **settings), made()
    for step in range(2 * STEPS):
        for model, optimizer in (pair, plain):
            torch.manual_seed(step)
            model(batch(step))["loss"].backward()
            if (step + 1) % settings.get("accumulation_steps", 1) == 0:
                if "max_grad_norm" in settings and model is plain[0]:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
                optimizer.step()
                optimizer.zero_grad()
    check_from_files(pair[0])
    assert_same(pair, plain)


@pytest.mark.parametrize("per_pass", [None, 2])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_block_by_block(path, max_grad_norm, per_pass):
    """All three micro-batches at once, or in a pass of two and a short one."""
    config = offmate.Config(updates="host", accumulation_order="by block", micro_batches_per_pass=per_pass)
    gate = {} if max_grad_norm is None else {"max_grad_norm": max_grad_norm}
    pair = from_files(path, accumulation_steps=3, config=config, cpu_budget=2_000_000, **gate)
    plain, data = made(), [{"x": batch(step)} for step in range(9)]
    for model, optimizer in (pair, plain):
        torch.manual_seed(0)
        for i, inputs in enumerate(model.offmate.batches(data) if model is pair[0] else data, 1):
            (model(**inputs)["loss"] / 3).backward()
            if i % 3 == 0:
                if max_grad_norm is not None and model is plain[0]:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
    assert pair[0].offmate.plan.schedule.per_step == (per_pass or 3)
    check_from_files(pair[0])
    assert_same(pair, plain)


def test_writes_through_tensors_that_are_held_count_after_a_sync(path):
    pair, plain = from_files(path), made()
    train(*pair, range(2)), train(*plain, range(2))
    held = [[state["exp_avg"] for state in optimizer.state.values()] for _, optimizer in (pair, plain)]
    for step in range(2, 4):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        pair[0].offmate.sync()
        for tensors in held:
            for tensor in tensors:
                tensor.data.mul_(2)
    pair[1].state_dict()
    assert train(*pair, range(5, 7)) == train(*plain, range(5, 7))
    assert_same(pair, plain)


def test_edits_of_states_count(path):
    pair, plain = from_files(path), made()
    for step in range(STEPS):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        for model, optimizer in (pair, plain):
            for param in model.parameters():
                optimizer.state[param]["exp_avg"].mul_(2)
    assert train(*pair, range(4, 6)) == train(*plain, range(4, 6))
    assert_same(pair, plain)


def test_checkpoints_link_the_states_and_training_goes_on(path):
    check_checkpoints(from_files(path))


@pytest.mark.parametrize("number", [0, 15, 30, 45, 60])
def test_an_interrupt_loses_nothing(path, number):
    check_interrupt(from_files(path), number, steps=2)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failing_disk_is_named_and_leaves_no_silent_mixture(path, monkeypatch, call):
    faulty = use_faulty_files(monkeypatch)
    check_failing(from_files(path), faulty, call, once(broken))


def test_a_spoilt_file_ends_training_before_a_wrong_number(path, tmp_path):
    check_spoilt(from_files(path), tmp_path / "disk")


def test_a_full_disk_makes_no_update(path, monkeypatch):
    """After a checkpoint, new files are reserved before the first update begins."""
    pair = from_files(path)
    train(*pair, range(2))
    before = copy.deepcopy(pair[0].state_dict())
    store = pair[0]._offmate_session.truth.host.store

    def full() -> None:
        raise offmate.StorageError("no space left")

    monkeypatch.setattr(store, "make_room", full)
    with pytest.raises(offmate.StorageError, match="no update was made"):
        train(*pair, range(2, 3))
    assert all(torch.equal(value, before[name]) for name, value in pair[0].state_dict().items())


@pytest.mark.parametrize("max_us", [0, 300])
def test_on_an_accelerator(path, sim, ring, max_us):
    """A missing wait would show as other numbers."""
    sim.set_delays(1, max_us)
    plain = made()
    with without_allocator():
        pair = from_files(path, device="sim", cpu_budget=BUDGETS["cpu_budget"] + 6 * (1 << 14))
        for step in range(4):
            assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
            if step % 2:
                assert_same(pair, plain)
    check_from_files(pair[0])
    pair[0]._offmate_session.device.close()
