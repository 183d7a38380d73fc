"""Parameters that are cast from float32 copies on a device with streams: plain PyTorch's numbers, whatever is late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ...accelerator.loops import without_allocator
from . import test_cast_parameters
from .test_cast_parameters import (
    BUDGETS,
    cast_in,
    check_cast,
    few_layers_in_pieces,
    folder,
    one_cache,
    path,
    ring,
    small_requests,
    test_behind_a_gate,
    test_checkpoints_link_the_new_values_and_training_goes_on,
    test_copies_of_another_layout_are_not_cast,
    test_edits_of_copies_count,
    test_edits_of_parameters_count,
    test_evaluation_reads_the_new_values,
    test_losses_weights_and_states_are_plain_pytorchs,
    test_whatever_the_user_does_between_and_within_steps,
    with_masters,
)
from .test_state_storage import assert_same, made, train

__all__ = [  # fixtures, and promises of the emulated device that hold here as well
    "few_layers_in_pieces", "folder", "one_cache", "path", "ring", "small_requests",
    "test_behind_a_gate",
    "test_checkpoints_link_the_new_values_and_training_goes_on",
    "test_copies_of_another_layout_are_not_cast",
    "test_edits_of_copies_count",
    "test_edits_of_parameters_count",
    "test_evaluation_reads_the_new_values",
    "test_losses_weights_and_states_are_plain_pytorchs",
    "test_whatever_the_user_does_between_and_within_steps",
    "with_masters",
]  # fmt: skip

RINGS_BYTES = 10 << 14  # RAM that copies to the device and from it pass, and casts


@pytest.fixture(autouse=True)
def on_streams(sim: Any, ring: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels, copies and events come late, and freed memory holds NaN."""
    sim.set_delays(1, 300)
    monkeypatch.setitem(BUDGETS, "device", "sim")
    monkeypatch.setitem(BUDGETS, "cpu_budget", BUDGETS["cpu_budget"] + RINGS_BYTES)
    monkeypatch.setattr(test_cast_parameters.test_state_storage.Deep, "dropout", 0.0)
    with without_allocator():
        yield


def test_casts_have_a_thread_of_their_own(path):
    """A cast does not wait for a file that is read for something else."""
    pair, plain = cast_in(path), made()
    assert train(*pair, range(3)) == train(*plain, range(3))
    check_cast(pair[0])
    assert True in pair[0]._offmate_session.device._from_files
    assert_same(pair, plain)
