"""Trained parameters in files on a device with streams: plain PyTorch's numbers, whatever the user does and when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import offmate

from ...accelerator.loops import without_allocator
from .meddling import check_meddling
from .test_parameters_in_files import (
    BUDGETS,
    all_leave,
    check_stored,
    few_layers,
    in_files,
    path,
    test_a_checkpoint_links_them_and_training_goes_on_in_other_files,
    test_a_failing_disk_ends_training_by_name,
    test_a_forward_alone_moves_nothing_to_ram,
    test_a_full_disk_is_named_before_the_first_step,
    test_a_spoilt_file_ends_training_before_a_wrong_number,
    test_an_evaluation_before_the_first_step_is_as_large_as_the_model_that_was_loaded,
    test_an_interrupt_loses_nothing,
    test_as_many_bytes_are_read_and_written_as_planned,
    test_behind_a_gate,
    test_edits_of_parameters_count,
    test_losses_weights_and_states_are_plain_pytorchs,
)
from .test_state_storage import assert_same, made, one_cache, ring, small_requests, train
from .test_state_storage import path as folder

__all__ = [  # fixtures, and promises of the emulated device that hold here as well
    "all_leave", "few_layers", "folder", "one_cache", "path", "ring", "small_requests",
    "test_a_checkpoint_links_them_and_training_goes_on_in_other_files",
    "test_a_failing_disk_ends_training_by_name",
    "test_a_forward_alone_moves_nothing_to_ram",
    "test_a_full_disk_is_named_before_the_first_step",
    "test_a_spoilt_file_ends_training_before_a_wrong_number",
    "test_an_evaluation_before_the_first_step_is_as_large_as_the_model_that_was_loaded",
    "test_an_interrupt_loses_nothing",
    "test_as_many_bytes_are_read_and_written_as_planned",
    "test_behind_a_gate",
    "test_edits_of_parameters_count",
    "test_losses_weights_and_states_are_plain_pytorchs",
]  # fmt: skip

RINGS_BYTES = 6 << 14  # RAM that copies to the device and from it pass


@pytest.fixture(autouse=True)
def on_streams(sim: Any, ring: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels, copies and events come late, and freed memory holds NaN."""
    sim.set_delays(1, 300)
    monkeypatch.setitem(BUDGETS, "device", "sim")
    monkeypatch.setitem(BUDGETS, "cpu_budget", BUDGETS["cpu_budget"] + RINGS_BYTES)
    with without_allocator():
        yield


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.05}])
def test_whatever_the_user_does_between_and_within_steps(path, all_leave, sim, seed, settings):
    """Waits, reads, edits, evaluations and batches of another shape come at random, and so do delays."""
    sim.set_delays(seed, 2000)
    sizes = {"gpu_budget": 1_850_000, "cpu_budget": 600_000}
    pair, plain = in_files(path, **sizes, **settings), made()

    check_meddling(pair, plain, seed, **settings)
    assert_same(pair, plain)
    assert pair[0].offmate.peak_bytes <= sizes["gpu_budget"]


def test_where_ram_has_room_all_are_pinned_and_none_is_in_files(path, folder):
    pair, other = (in_files(one, cpu_budget="1GiB") for one in (path, _beside(folder)))
    assert train(*pair, range(2)) == train(*other, range(2))
    assert pair[0].offmate.plan.schedule.actions == other[0].offmate.plan.schedule.actions
    for model in (pair[0], other[0]):
        assert all(own.is_pinned() for own in model._offmate_session.truth.host.params.values())


def _beside(folder: offmate.StoragePath) -> offmate.StoragePath:
    other = Path(folder.folder).parent / "other"
    other.mkdir()
    return offmate.StoragePath(other, read="1GB/s", write="1GB/s")


def test_what_is_in_ram_beside_them_is_pinned(path):
    pair = in_files(path)
    train(*pair, range(2))
    check_stored(pair[0])
    host = pair[0]._offmate_session.truth.host
    in_ram = [own for name, own in host.params.items() if not host.stores(name)]
    assert in_ram and all(own.is_pinned() for own in in_ram)
