"""The CPU updates parameters in files beside their states, for a device with streams: plain PyTorch's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ...accelerator.loops import without_allocator
from .meddling import check_meddling
from .test_state_storage import assert_same, made, one_cache, ring, small_requests
from .test_state_storage import path as folder
from .test_updates_from_files import few_layers_in_pieces
from .test_values_beside_states import (
    BUDGETS,
    always,
    check_in_files,
    in_files,
    path,
    test_a_failing_disk_is_named_and_leaves_no_silent_mixture,
    test_an_interrupt_loses_nothing,
    test_behind_a_gate,
    test_checkpoints_link_both_and_training_goes_on,
    test_edits_between_steps_count,
    test_evaluation_reads_the_new_values,
)

__all__ = [  # fixtures, and promises of the emulated device that hold here as well
    "always", "few_layers_in_pieces", "folder", "one_cache", "path", "ring", "small_requests",
    "test_a_failing_disk_is_named_and_leaves_no_silent_mixture",
    "test_an_interrupt_loses_nothing",
    "test_behind_a_gate",
    "test_checkpoints_link_both_and_training_goes_on",
    "test_edits_between_steps_count",
    "test_evaluation_reads_the_new_values",
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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.05}])
def test_whatever_the_user_does_between_and_within_steps(path, always, sim, seed, settings):
    """Waits, reads, edits, evaluations and batches of another shape come at random, and so do delays."""
    sim.set_delays(seed, 2000)
    pair, plain = (
        in_files(path, gpu_budget=1_400_000, cpu_budget=1_900_000, **settings),
        made(),
    )

    check_meddling(pair, plain, seed, **settings)
    check_in_files(pair[0])
    assert_same(pair, plain)
