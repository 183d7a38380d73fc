"""Parameters of which RAM has float32 copies alone: plain PyTorch's numbers, whatever the user does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from offmate.runtime.replay import cast
from offmate.solver.items import parameter
from offmate.solver.schedule import Kind

import offmate

from ...runtime.storage.faulty import once
from . import test_state_storage
from .disks import broken, use_faulty_files
from .meddling import check_meddling
from .test_linked_states import check_checkpoints
from .test_state_storage import (
    KINDS,
    STEPS,
    assert_same,
    batch,
    check_failing,
    check_interrupt,
    compiled,
    made,
    one_cache,
    ring,
    small_requests,
    train,
)
from .test_state_storage import path as folder
from .test_updates_from_files import few_layers_in_pieces

__all__ = ["few_layers_in_pieces", "folder", "one_cache", "ring", "small_requests"]  # fixtures

BUDGETS: dict[str, Any] = {"gpu_budget": 700_000, "cpu_budget": 1_800_000}


@pytest.fixture(autouse=True)
def with_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models are in bfloat16, and their optimizers update float32 copies."""
    make, dtype = KINDS["masters"]
    monkeypatch.setattr(made, "__defaults__", (make, dtype))
    monkeypatch.setattr(train, "__defaults__", (dtype,))
    monkeypatch.setattr(batch, "__defaults__", (dtype, 16))
    monkeypatch.setattr(cast, "PIECE_BYTES", 1 << 14)  # several of each parameter


@pytest.fixture
def path(folder: offmate.StoragePath) -> offmate.StoragePath:
    return replace(folder, parameters=True)


def cast_in(path: Any, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    """All updates are the CPU's, and RAM has no room for all values beside the states."""
    make, dtype = KINDS["masters"]
    return compiled(path, make, dtype, **{**BUDGETS, "config": offmate.Config(updates="host"), **settings})


def check_cast(model: Any) -> frozenset[str]:
    """What is cast takes no RAM, and its state does."""
    host, schedule = model._offmate_session.truth.host, model.offmate.plan.schedule
    names: frozenset[str] = schedule.cast_parameters
    assert names and names <= schedule.update_cpu_s.keys() - schedule.updated_from_files
    assert {name for name in host.params if host.stores(name)} == schedule.parameters_in_files
    assert names <= schedule.parameters_in_files and names.isdisjoint(host.in_store)
    return names


def newer(model: Any) -> set[str]:
    return model._offmate_session.truth.host.newer_copies


def test_losses_weights_and_states_are_plain_pytorchs(path):
    pair, plain = cast_in(path), made()
    assert train(*pair, range(STEPS)) == train(*plain, range(STEPS))
    names = check_cast(pair[0])
    assert_same(pair, plain)
    assert not newer(pair[0]), "who reads them finds them in their files"
    for step in range(3, 6):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        assert newer(pair[0]) and newer(pair[0]) <= names
        assert_same(pair, plain)
    assert pair[0].offmate.plan.host_bytes <= BUDGETS["cpu_budget"]
    assert pair[0].offmate.peak_bytes <= BUDGETS["gpu_budget"]


def test_nothing_of_them_moves_to_files_or_from_there_while_training(path):
    pair = cast_in(path)
    train(*pair, range(2))
    host, names = pair[0]._offmate_session.truth.host, check_cast(pair[0])
    before = {name: host.params[name].clone() for name in names}  # as the mapping shows the files
    train(*pair, range(2, 5))
    stored = host.store.bytes_of(host.params[min(names)]).stored
    assert all(torch.equal(host.params[name], value) for name, value in before.items())
    for file in stored.files:
        file.write_bytes(bytes(file.stat().st_size))  # nobody reads it
    train(*pair, range(5, 7))
    plain = made()
    train(*plain, range(7))
    assert_same(pair, plain)


def test_with_paths_for_states_alone_they_are_in_ram(folder):
    pair, plain = cast_in(folder), made()
    assert train(*pair, range(STEPS)) == train(*plain, range(STEPS))
    assert not pair[0].offmate.plan.schedule.cast_parameters
    assert_same(pair, plain)


def test_where_ram_has_room_they_are_there(path):
    pair = cast_in(path, cpu_budget="1GiB")
    train(*pair, range(1))
    schedule = pair[0].offmate.plan.schedule
    assert not schedule.cast_parameters and not any(tier.casts for tier in schedule.rates.tiers)


@pytest.mark.parametrize(
    "settings", [{"max_grad_norm": 0.05}, {"accumulation_steps": 3}, {"accumulation_steps": 3, "max_grad_norm": 0.05}]
)
def test_behind_a_gate(path, settings):
    """With accumulation, the copies are cast again for every micro-batch."""
    pair, plain = cast_in(path, **settings), made()
    for step in range(2 * STEPS):
        for model, optimizer in (pair, plain):
            torch.manual_seed(step)
            model(batch(step))["loss"].backward()
            if (step + 1) % settings.get("accumulation_steps", 1) == 0:
                if "max_grad_norm" in settings and model is plain[0]:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
                optimizer.step()
                optimizer.zero_grad()
    check_cast(pair[0])
    assert_same(pair, plain)


def test_updates_before_the_gate_keep_values_in_ram(path):
    config = offmate.Config(updates="host", speculate=True)
    pair, plain = cast_in(path, max_grad_norm=1e4, config=config, cpu_budget=2_400_000), made()
    for step in range(STEPS):
        losses = []
        for model, optimizer in (pair, plain):
            torch.manual_seed(step)
            loss = model(batch(step))["loss"]
            loss.backward()
            if model is plain[0]:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e4)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert not pair[0].offmate.plan.schedule.cast_parameters
    assert_same(pair, plain)


def _in_place(param: torch.nn.Parameter) -> None:
    param.mul_(0.5)


def _through_data(param: torch.nn.Parameter) -> None:
    param.data[0] = 0.25


def _through_numpy(param: torch.nn.Parameter) -> None:
    param.detach().view(torch.int16).numpy()[...] = 0x3C00


def _replaced(param: torch.nn.Parameter) -> None:
    param.data = param.data * 0.5


@pytest.mark.parametrize("edit", [_in_place, _through_data, _through_numpy, _replaced])
def test_edits_of_parameters_count(path, edit: Callable[[torch.nn.Parameter], None]):
    pair, plain = cast_in(path), made()
    for step in range(STEPS):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        with torch.no_grad():
            for model in (pair[0], plain[0]):
                for param in list(model.parameters())[step % 2 :: 2]:
                    edit(param)
    assert train(*pair, range(3, 5)) == train(*plain, range(3, 5))
    check_cast(pair[0])
    assert_same(pair, plain)


@pytest.mark.parametrize("edit", [_in_place, _through_data, _through_numpy, _replaced])
@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_edits_before_a_step_behind_a_gate_count(path, tmp_path, edit, forgets, keeps):
    """The step reads the edited values from files if there is no copy yet, or if the user has cleared it."""
    pair, plain = cast_in(path, max_grad_norm=0.05), made()
    for step in range(STEPS + 1):
        for model, optimizer in (pair, plain):
            torch.manual_seed(step)
            model(batch(step))["loss"].backward()
            if step != 1:
                with torch.no_grad():
                    for param in model.parameters():
                        edit(param)
            if forgets and step > 1:
                optimizer.state.clear()
            if model is plain[0]:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            if keeps and model is pair[0]:
                offmate.save_checkpoint(tmp_path / f"step-{step}", model, optimizer)
    assert_same(pair, plain)


@pytest.mark.parametrize("way", ["in place", "through numpy", "replaced", "cleared", "loaded"])
def test_edits_of_copies_count(path, way):
    """A forward uses the parameter, which an edit of its copy changes with the next update only."""
    pair, plain = cast_in(path), made()
    for step in range(STEPS):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        for _, optimizer in (pair, plain):
            if way == "loaded":
                state = optimizer.state_dict()
                doubled = {n: {k: v * 2 if v.dim() else v for k, v in own.items()} for n, own in state["state"].items()}
                optimizer.load_state_dict({**state, "state": doubled})
                continue
            for own in list(optimizer.state.values()):
                if way == "in place":
                    own["master"].mul_(2)
                elif way == "through numpy":
                    own["master"].numpy()[...] *= 2
                elif way == "replaced":
                    own["master"] = own["master"] * 2
                else:
                    own.clear()
    assert train(*pair, range(3, 5)) == train(*plain, range(3, 5))
    assert_same(pair, plain)


def test_copies_of_another_layout_are_not_cast(path):
    """A copy whose strides are not its parameter's is no reason for other numbers."""
    pair, plain = cast_in(path), made()
    train(*pair, range(2)), train(*plain, range(2))
    names = check_cast(pair[0])
    for model, optimizer in (pair, plain):
        for name, param in model.named_parameters():
            if name in names:
                own = optimizer.state[param]
                own["master"] = own["master"].t().contiguous().t()
    assert train(*pair, range(2, 5)) == train(*plain, range(2, 5))
    assert not newer(pair[0])
    assert_same(pair, plain)


def test_evaluation_reads_the_new_values(path):
    pair, plain = cast_in(path), made()
    for step in range(STEPS):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        losses = []
        for model, _ in (pair, plain):
            model.eval()
            with torch.no_grad():
                losses.append(model(batch(9))["loss"].item())
            model.train()
        assert losses[0] == losses[1]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.05}])
def test_whatever_the_user_does_between_and_within_steps(path, monkeypatch, seed, settings):
    monkeypatch.setattr(test_state_storage.Deep, "dropout", 0.0)
    pair, plain = cast_in(path, **settings), made()
    check_meddling(pair, plain, seed, **settings)
    assert_same(pair, plain)


def test_another_plan_finds_the_new_values(path):
    """A plan for another batch, and one that trains fewer parameters, keep them in other places."""
    pair, plain = cast_in(path), made()
    train(*pair, range(2)), train(*plain, range(2))
    check_cast(pair[0])
    for model, optimizer in (pair, plain):
        model.layers[0].weight.requires_grad_(False)
        for step in range(2, 5):
            torch.manual_seed(step)
            model(batch(step, rows=8 * step))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(pair, plain)


def test_checkpoints_link_the_new_values_and_training_goes_on(path, tmp_path):
    pair, plain = cast_in(path), made()
    train(*pair, range(2)), train(*plain, range(2))
    names = check_cast(pair[0])
    offmate.save_checkpoint(tmp_path / "step-2", *pair)
    assert not torch.load(tmp_path / "step-2" / "model.pt", weights_only=True).keys() & names
    assert train(*pair, range(2, 4)) == train(*plain, range(2, 4))
    assert_same(pair, plain)
    pair[0]._offmate_session.storage.close()
    plain = made()
    train(*plain, range(2))
    again = cast_in(path)
    offmate.load_checkpoint(tmp_path / "step-2", *again)
    assert train(*again, range(2, 4)) == train(*plain, range(2, 4))
    check_cast(again[0])
    assert_same(again, plain)


def test_many_checkpoints(path):
    check_checkpoints(cast_in(path))


@pytest.mark.parametrize("number", [0, 10, 20, 30, 40])
def test_an_interrupt_loses_nothing(path, number):
    check_interrupt(cast_in(path), number, steps=2)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("skipped", [0, 7, 23])
def test_a_failing_disk_is_named_and_leaves_no_silent_mixture(path, monkeypatch, call, skipped):
    faulty = use_faulty_files(monkeypatch)
    check_failing(cast_in(path), faulty, call, once(broken, skipped))


def test_values_that_cannot_be_written_are_called_lost(path, monkeypatch):
    """The disk fails when somebody reads the parameters."""
    faulty = use_faulty_files(monkeypatch)
    pair = cast_in(path)
    train(*pair, range(2))
    names = check_cast(pair[0])
    for event in list(pair[0]._offmate_session.residence.active.executor._contents.written.values()):
        event.synchronize()
    faulty.faults["pwritev"] = broken
    with pytest.raises(offmate.StorageError, match="Input/output error"):
        pair[0].state_dict()
    assert names <= {*pair[0]._offmate_session.truth.torn}
    faulty.faults.clear()
    with pytest.raises(offmate.OffmateError, match="Load a checkpoint"):
        train(*pair, range(2, 3))


def test_the_plan_says_what_takes_no_ram(path, tmp_path):
    pair = cast_in(path)
    train(*pair, range(1))
    plan, names = pair[0].offmate.plan, check_cast(pair[0])
    assert (
        "of parameters take no RAM: for each copy to the GPU, they are cast from the float32 copies" in plan.explain()
    )
    assert plan.read_bytes == 0
    moved = {action.item for action in plan.schedule.actions if action.kind is Kind.OFFLOAD}
    assert not moved & {parameter(name) for name in names}
    assert sum(one.stored_bytes for one in pair[0].offmate.storage) >= plan.schedule.bytes_in_files
    plan.save(tmp_path / "plan.json")
    assert offmate.load_plan(tmp_path / "plan.json").schedule == plan.schedule


def test_a_spoilt_file_ends_training_before_a_wrong_number(path):
    """When another plan has taken over, the next forward takes parameters from their files."""
    pair = cast_in(path)
    train(*pair, range(2))
    names = check_cast(pair[0])
    session = pair[0]._offmate_session
    session.residence.bring_home()
    host = session.truth.host
    for name in names:
        for file in host.store.bytes_of(host.params[name]).stored.files:
            test_state_storage.flip_a_bit(file, 1000)
    test_state_storage.check_refused(pair, range(2, 4))
