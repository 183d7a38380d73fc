"""Activations and interface values that neither the GPU nor RAM has room for lie in files: plain PyTorch's numbers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from offmate.solver.items import ItemKind

import offmate

from ...accelerator.loops import without_allocator
from ...runtime.storage.faulty import flipped, once
from . import test_state_storage
from .disks import broken, full, use_faulty_files
from .test_state_storage import (
    KINDS,
    assert_same,
    batch,
    compiled,
    disk,
    made,
    one_cache,
    path,
    ring,
    small_requests,
)

__all__ = ["one_cache", "path", "ring", "small_requests"]  # fixtures

ROWS = 2048
BUDGETS = {"gpu_budget": 4_600_000, "cpu_budget": 1_500_000}
HALVED = {"gpu_budget": 2_900_000, "cpu_budget": 900_000}


@pytest.fixture(autouse=True)
def more_activations_than_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(test_state_storage, "WIDTH", 64)
    yield


def steps(
    pair: Any, numbers: range, dtype: torch.dtype = torch.float32, micro: int = 1, rows: int = ROWS
) -> list[float]:
    """Make updates, each of some micro-batches, which a compiled model may run block by block; return the losses."""
    model, optimizer = pair
    losses = []
    for number in numbers:
        torch.manual_seed(number)
        given = [{"x": batch(micro * number + i, dtype, rows)} for i in range(micro)]
        session = getattr(model, "_offmate_session", None)
        by_block = session is not None and session.request.config.accumulation_order == "by block"
        for one in model.offmate.batches(given) if by_block else given:
            loss = model(**one)["loss"]
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def check_plan(model: Any, **budgets: int) -> None:
    """Values of both kinds leave to files, and both budgets are kept."""
    schedule = model.offmate.plan.schedule
    assert {item.kind for item in schedule.values_in_files} == {ItemKind.OFFLOADED, ItemKind.VALUE}
    assert model.offmate.plan.host_bytes <= budgets["cpu_budget"]
    assert model.offmate.peak_bytes <= budgets["gpu_budget"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_weights_and_states_are_plain_pytorchs(path, kind):
    make, dtype = KINDS[kind]
    budgets = HALVED if dtype == torch.bfloat16 else BUDGETS
    pair, plain = compiled(path, make, dtype, **budgets), made(make, dtype)
    for numbers in (range(3), range(3, 5)):
        assert steps(pair, numbers, dtype) == steps(plain, numbers, dtype)
        assert_same(pair, plain)
    check_plan(pair[0], **budgets)


def test_without_storage_they_do_not_fit():
    with pytest.raises(offmate.InfeasibleBudget):
        steps(compiled(None, **BUDGETS), range(1))


def test_where_ram_has_room_plans_are_those_without_storage(path):
    pair, other = (compiled(one, **{**BUDGETS, "cpu_budget": "1GiB"}) for one in (path, None))
    assert steps(pair, range(2)) == steps(other, range(2))
    assert pair[0].offmate.plan.schedule.actions == other[0].offmate.plan.schedule.actions
    assert pair[0].offmate.plan.stored_bytes == (0, 0)


def test_as_many_bytes_are_written_and_read_as_planned(path):
    pair = compiled(path, **BUDGETS)
    steps(pair, range(3))
    plan = pair[0].offmate.plan
    read, written = plan.stored_bytes
    assert read == written == sum(plan.schedule.item_bytes[item] for item in plan.schedule.values_in_files)
    assert (disk(pair[0]).read_bytes, disk(pair[0]).written_bytes) == (3 * read, 3 * written)
    assert sum(one.stored_bytes for one in pair[0].offmate.storage) >= written
    assert "of activations are read from the storage paths" in plan.explain()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [
    {"max_grad_norm": float("inf")},
    {"accumulation_steps": 3},
    {"accumulation_steps": 3, "config": offmate.Config(accumulation_order="by block"), "gpu_budget": 14_000_000},
    {"accumulation_steps": 4, "config": offmate.Config(accumulation_order="by block", micro_batches_per_pass=2),
     "gpu_budget": 9_000_000},
])  # fmt: skip
def test_behind_a_gate_and_of_several_micro_batches(path, settings):
    pair, plain = compiled(path, **{**BUDGETS, **settings}), made()
    micro = settings.get("accumulation_steps", 1)
    assert steps(pair, range(4), micro=micro) == steps(plain, range(4), micro=micro)
    assert_same(pair, plain)
    assert pair[0].offmate.plan.schedule.values_in_files


def test_plans_that_take_turns_and_forwards_between(path):
    """Batches of other shapes, and evaluations before the backward and after it."""
    pair, plain = compiled(path, **BUDGETS), made()
    for number, rows in enumerate((ROWS, ROWS // 2, ROWS, ROWS // 2, ROWS)):
        assert steps(pair, range(number, number + 1), rows=rows) == steps(plain, range(number, number + 1), rows=rows)
        for model in (pair[0], plain[0]):
            torch.manual_seed(number)
            with torch.no_grad():
                model(x=batch(90, rows=ROWS // 2))
    for model, optimizer in (pair, plain):
        torch.manual_seed(9)
        loss = model(x=batch(9, rows=ROWS))["loss"]
        with torch.no_grad():
            model(x=batch(91, rows=ROWS // 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(pair, plain)


def test_a_forward_without_a_backward_leaves_nothing_behind(path):
    pair, plain = compiled(path, **BUDGETS), made()
    for number in range(4):
        for model in (pair[0], plain[0]):
            torch.manual_seed(50 + number)
            model(x=batch(50 + number, rows=ROWS))
        assert steps(pair, range(number, number + 1)) == steps(plain, range(number, number + 1))
    assert_same(pair, plain)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(0, 90, 7))
def test_an_interrupt_leaves_whole_values(path, number):
    pair, plain = compiled(path, **BUDGETS), made()
    steps(pair, range(2)), steps(plain, range(2))
    left = [number]

    def stop(action: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    executor = pair[0]._offmate_session.residence.active.executor
    executor.on_action = stop
    with contextlib.suppress(KeyboardInterrupt):
        steps(pair, range(2, 3))
    executor.on_action = None
    pair[1].zero_grad()
    pair[0].load_state_dict(plain[0].state_dict())
    pair[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    assert steps(pair, range(3, 5)) == steps(plain, range(3, 5))
    assert_same(pair, plain)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("skip", [0, 3, 20])
def test_a_disk_that_fails_once_makes_no_wrong_number(path, call, skip, monkeypatch):
    """The step ends with an error, and later ones are plain PyTorch's from the values that are loaded."""
    faulty = use_faulty_files(monkeypatch)
    pair, plain = compiled(path, **BUDGETS), made()
    steps(pair, range(2)), steps(plain, range(2))
    faulty.faults[call] = once(broken, skip)
    with pytest.raises(offmate.StorageError, match="Input/output error"):
        steps(pair, range(2, 3))
    pair[1].zero_grad()
    pair[0].load_state_dict(plain[0].state_dict())
    pair[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    assert steps(pair, range(3, 5)) == steps(plain, range(3, 5))
    assert_same(pair, plain)


def test_a_flipped_bit_is_found(path, monkeypatch):
    faulty = use_faulty_files(monkeypatch)
    pair = compiled(path, **BUDGETS)
    steps(pair, range(2))
    faulty.faults["preadv"] = once(flipped, 5)
    with pytest.raises(offmate.StorageError, match="checksum"):
        steps(pair, range(2, 3))


def test_a_full_disk_is_said_in_the_first_step(path, monkeypatch):
    """As often as it is; with more space, training goes on, and the tier's bytes are counted right."""
    faulty = use_faulty_files(monkeypatch)
    pair, plain = compiled(path, **BUDGETS), made()
    for skip in (1, 1, 3):
        faulty.faults["fallocate"] = once(full, skip)
        with pytest.raises(offmate.StorageError, match="No space left"):
            steps(pair, range(1))
    assert_same(pair, plain)
    assert steps(pair, range(2)) == steps(plain, range(2))
    assert_same(pair, plain)


def test_their_space_stays_while_the_model_is_evaluated(path, monkeypatch):
    """No disk that another program has filled meanwhile can end training, and nothing is reserved again.

    Smaller batches use the same space.
    """
    faulty = use_faulty_files(monkeypatch)
    pair, plain = compiled(path, **BUDGETS), made()
    assert steps(pair, range(2)) == steps(plain, range(2))
    faulty.faults["fallocate"] = full
    for number in range(2, 5):
        for model in (pair[0], plain[0]):
            torch.manual_seed(number)
            with torch.no_grad():
                model(x=batch(90, rows=ROWS // 2))
            model(x=batch(91, rows=ROWS))  # dropped
        assert steps(pair, range(number, number + 1)) == steps(plain, range(number, number + 1))
        pair[0].state_dict()
    assert_same(pair, plain)
    stored = sum(one.stored_bytes for one in pair[0].offmate.storage)
    assert steps(pair, range(5, 6), rows=ROWS // 2) == steps(plain, range(5, 6), rows=ROWS // 2)
    assert sum(one.stored_bytes for one in pair[0].offmate.storage) == stored


def test_their_space_is_given_back_for_another_plan(path):
    pair, plain = compiled(path, **BUDGETS, config=offmate.Config(shape_buckets=(ROWS // 2,))), made()
    assert steps(pair, range(1)) == steps(plain, range(1))
    stored = sum(one.stored_bytes for one in pair[0].offmate.storage)
    assert steps(pair, range(1, 2), rows=ROWS // 2) == steps(plain, range(1, 2), rows=ROWS // 2)
    assert sum(one.stored_bytes for one in pair[0].offmate.storage) < stored


@pytest.mark.parametrize("max_us", [0, 300])
def test_on_an_accelerator(path, sim, ring, max_us):
    """A missing wait would show as other numbers."""
    sim.set_delays(1, max_us)
    with without_allocator():
        pair = compiled(path, device="sim", **{**BUDGETS, "cpu_budget": BUDGETS["cpu_budget"] + 6 * (1 << 14)})
        found = steps(pair, range(4))
        assert pair[0].offmate.plan.schedule.values_in_files
        parameters = {name: value.cpu() for name, value in pair[0].state_dict().items()}
    plain = made()
    assert found == steps(plain, range(4))
    assert not [name for name, value in plain[0].state_dict().items() if not torch.equal(value, parameters[name])]
    pair[0]._offmate_session.device.close()
