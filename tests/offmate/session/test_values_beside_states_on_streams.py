"""The CPU updates parameters in files beside their states, for a device with streams: plain PyTorch's numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ...accelerator.loops import without_allocator
from .test_state_storage import assert_same, batch, made, one_cache, ring, small_requests
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
    pair, plain, chance = (
        in_files(path, gpu_budget=1_400_000, cpu_budget=1_900_000, **settings),
        made(),
        random.Random(seed),
    )

    def meddle(model: Any, optimizer: torch.optim.Optimizer, what: str, step: int) -> object:
        param = list(model.parameters())[step % 8]
        if what == "edit":
            with torch.no_grad():
                param.mul_(0.9)
        elif what == "evaluate":
            with torch.no_grad():
                loss = model.eval()(batch(step))["loss"].item()
            model.train()
            return loss
        elif what == "read":
            return param.detach().clone().sum().item()
        elif what == "states":
            return [t.sum().item() for s in optimizer.state_dict()["state"].values() for t in s.values() if t.dim()]
        elif what == "sync" and hasattr(model, "offmate"):
            model.offmate.sync()
        return None

    for step in range(6):
        rows, seen = chance.choice([16, 16, 16, 8]), []
        within, between = chance.choice(["", "", "sync", "read"]), chance.choice(["", "edit", "evaluate", "read",
                                                                                  "states", "sync"])  # fmt: skip
        for model, optimizer in (pair, plain):
            loss = model(batch(step, rows=rows))["loss"]
            loss.backward()
            # Without a gate, updates begin in the backward, and plain PyTorch's come with `step()`.
            found = meddle(model, optimizer, within if settings or within == "sync" else "", step)
            if settings and model is plain[0]:
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
            seen.append((loss.item(), found, meddle(model, optimizer, between, step)))
        assert seen[0] == seen[1], (step, within, between)
    check_in_files(pair[0])
    assert_same(pair, plain)
