"""Pieces of one optimizer state wait in different places: plain PyTorch's numbers, whatever the user does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offmate.solver.items import Item, ItemKind
from offmate.solver.options import pieces
from offmate.solver.resources import HOST
from offmate.solver.schedule import Kind, Schedule

from ...accelerator.loops import without_allocator
from . import test_state_storage
from .test_linked_states import check_checkpoints
from .test_state_storage import (
    STEPS,
    assert_same,
    check_interrupt,
    compiled,
    made,
    one_cache,
    path,
    ring,
    small_requests,
    stored_bytes,
    train,
)

__all__ = ["one_cache", "path", "ring", "small_requests"]  # fixtures

BUDGETS = {"gpu_budget": 1_100_000, "cpu_budget": 1_200_000}


@pytest.fixture(autouse=True)
def few_layers_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight's state is cut into three pieces."""
    monkeypatch.setattr(test_state_storage, "LAYERS", 4)
    monkeypatch.setattr(pieces, "_LEAST_BYTES", 1 << 17)


def in_pieces(path: Any, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    return compiled(path, **{**BUDGETS, **settings})


def places(schedule: Schedule) -> dict[Item, str]:
    """The tiers that pieces of states leave to."""
    leaving = {a.item for a in schedule.actions if a.kind is Kind.OFFLOAD and a.item.kind is ItemKind.STATE}
    return {item: schedule.homes.get(item, HOST) for item in leaving}


def waiting(schedule: Schedule) -> set[Item]:
    """The pieces that leave to RAM, of states that have their homes in files."""
    return {i for i, tier in places(schedule).items() if tier == HOST and i.name in schedule.states_in_files}


def check_mixed(model: Any) -> None:
    """Some state has pieces in RAM and pieces in files."""
    schedule = model.offmate.plan.schedule
    tiers = places(schedule)
    mixed = {item.name for item in waiting(schedule)}
    assert any({tiers.get(item) for item in schedule.states[name]} >= {HOST, "storage paths"} for name in mixed)


def test_losses_weights_and_states_are_plain_pytorchs(path):
    pair, plain = in_pieces(path), made()
    assert train(*pair, range(STEPS)) == train(*plain, range(STEPS))
    check_mixed(pair[0])
    stored_bytes(pair[0])
    assert pair[0].offmate.plan.host_bytes <= BUDGETS["cpu_budget"]
    assert pair[0].offmate.peak_bytes <= BUDGETS["gpu_budget"]
    assert_same(pair, plain)
    for step in range(STEPS, STEPS + 2):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        assert_same(pair, plain)


def test_ram_has_the_pieces_that_leave_to_it_and_no_others(path):
    pair = in_pieces(path)
    train(*pair, range(2))
    pair[0].offmate.sync()
    session, schedule = pair[0]._offmate_session, pair[0].offmate.plan.schedule
    memory = session.residence.active.executor._by_kind.states._homes._of
    held = {item: sum(tensor.nbytes for tensor in parts.values()) for item, parts in memory.items()}
    assert held == {item: schedule.item_bytes[item] for item in waiting(schedule)}
    store, states = session.truth.host.store, session.truth.host.states
    for name in schedule.update_device_s:
        in_files = {store.holds(v) for v in states[name].values() if isinstance(v, torch.Tensor) and v.dim()}
        assert in_files == {name in schedule.states_in_files}


def _written(state: dict[str, Any]) -> None:
    state["exp_avg"].mul_(2)


def _replaced(state: dict[str, Any]) -> None:
    state["exp_avg"] = torch.full_like(state["exp_avg"], 0.25)


@pytest.mark.parametrize("edit", [_written, _replaced, dict.clear])
def test_edits_of_states_count(path, edit):
    pair, plain = in_pieces(path), made()
    for step in range(STEPS):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        for model, optimizer in (pair, plain):
            for param in model.parameters():
                edit(optimizer.state[param])
    assert train(*pair, range(4, 6)) == train(*plain, range(4, 6))
    assert_same(pair, plain)


def test_writes_through_tensors_that_are_held_count_after_a_sync(path):
    pair, plain = in_pieces(path), made()
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


def test_evaluation_between_steps_takes_nothing_back(path):
    pair, plain = in_pieces(path), made()
    for step in range(STEPS):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        for model, _ in (pair, plain):
            model.eval()
        with torch.no_grad():
            losses = [model(test_state_storage.batch(9))["loss"] for model, _ in (pair, plain)]
        assert losses[0] == losses[1]
        for model, _ in (pair, plain):
            model.train()
    assert_same(pair, plain)


def test_checkpoints_link_what_waited_in_ram_too(path):
    check_checkpoints(in_pieces(path))


@pytest.mark.parametrize("number", [0, 15, 30, 45, 60])
def test_an_interrupt_loses_nothing(path, number):
    check_interrupt(in_pieces(path), number, steps=2)


@pytest.mark.parametrize("max_us", [0, 300])
def test_on_an_accelerator(path, sim, ring, max_us):
    """A missing wait would show as other numbers."""
    sim.set_delays(1, max_us)
    plain = made()
    with without_allocator():
        pair = in_pieces(path, device="sim", cpu_budget=BUDGETS["cpu_budget"] + 6 * (1 << 14))
        for step in range(4):
            assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
            if step % 2:
                assert_same(pair, plain)
    check_mixed(pair[0])
    pair[0]._offmate_session.device.close()
