"""Copies and matrix products happen at their time, and are poison until then: a missing wait shows in the data."""

from __future__ import annotations

import pytest
import torch
from offmate.runtime.devices import streams

import offmate

from .card import behaving
from .cases import CASES, WIDE, Case
from .loops import Loop, training

pytestmark = pytest.mark.timeout(240)
N_STEPS = 5
# Slow enough that what does not wait for a copy comes before its end.
SLOW = {"deferred": 1, "link_bytes_per_s": 2e9, "kernel_s": 2e-5}

WATCHED = {name: CASES[name] for name in ("llama", "llama, clipped, three micro-batches")} | {"wide": WIDE}


def poisoned(loop: Loop, n_steps: int) -> int:
    """Train; how much work read what was not there yet."""
    with behaving(**SLOW):
        return sum(loop.step().poisoned_reads for _ in range(n_steps))


@pytest.mark.parametrize("case", WATCHED.values(), ids=WATCHED)
def test_nothing_is_read_before_it_is_there(case, cache_dir):
    with training(case, cache_dir) as loop:
        assert poisoned(loop, N_STEPS) == 0, "a product or a copy read memory before what fills it was done"


def test_what_travels_comes_back_as_it_left(cache_dir):
    """Updates on the card, whose kernels do nothing: parameters only travel."""
    expected = WIDE.model().state_dict()
    with training(WIDE, cache_dir, config=offmate.Config(cache_dir=cache_dir, updates="device")) as loop:
        assert poisoned(loop, N_STEPS) == 0
        state = loop.model.state_dict()
        assert all(torch.equal(state[name].cpu(), value) for name, value in expected.items())


def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let streams not wait for each other."""
    monkeypatch.setattr(streams.StreamEvent, "wait", lambda self, stream=None: None)


@pytest.mark.parametrize("case", WATCHED.values(), ids=WATCHED)
def test_missing_waits_are_seen(case: Case, cache_dir, monkeypatch):
    """The tests above would fail if the runtime did not wait."""
    with training(case, cache_dir) as loop:
        loop.step()
        without_waits(monkeypatch)
        found = poisoned(loop, N_STEPS)
        monkeypatch.undo()
    assert found > 0, "the stand-in does not see that no stream waits"
