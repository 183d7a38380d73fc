"""Copies and matrix products happen at their time, and are poison until then: a missing wait shows in the data."""

from __future__ import annotations

import pytest
import torch
from offmate.runtime.devices import streams

import offmate

from .card import behaving
from .cases import CASES, WIDE
from .loops import Loop, training

pytestmark = pytest.mark.timeout(240)
N_STEPS = 4
# What crosses the link in a step takes this long, far longer than launching the step does on a busy machine: what does
# not wait for a copy comes before its end.
LINK_S = 0.5
WATCHED = {name: CASES[name] for name in ("llama", "llama, clipped, three micro-batches")} | {"wide": WIDE}


def poisoned(loop: Loop, bytes_in: int) -> int:
    """Train; how much work read what was not there yet.

    Parameters
    ----------
    bytes_in: copied into the card in a step.
    """
    with behaving(deferred=1, link_bytes_per_s=bytes_in / LINK_S, kernel_s=2e-5):
        return sum(loop.step().poisoned_reads for _ in range(N_STEPS))


@pytest.mark.parametrize("case", WATCHED.values(), ids=WATCHED)
def test_nothing_is_read_before_it_is_there(case, cache_dir):
    with training(case, cache_dir) as loop:
        found = poisoned(loop, loop.step().bytes_in)
        assert found == 0, "a product or a copy read memory before what fills it was done"


def test_what_travels_comes_back_as_it_left(cache_dir):
    """Updates on the card, whose kernels do nothing: parameters only travel."""
    expected = WIDE.model().state_dict()
    with training(WIDE, cache_dir, config=offmate.Config(cache_dir=cache_dir, updates="device")) as loop:
        assert poisoned(loop, loop.step().bytes_in) == 0
        state = loop.model.state_dict()
        assert all(torch.equal(state[name].cpu(), value) for name, value in expected.items())


def copies_do_not_wait(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = streams._Direction._begin
    monkeypatch.setattr(streams._Direction, "_begin", lambda self, before, job: begin(self, (), job))


def computing_does_not_wait(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = streams.StreamEvent.wait
    copying = [way.stream for way in loop.model._offmate_session.device._ways.values()]

    def waits(self: streams.StreamEvent, stream: torch.Stream | None = None) -> None:
        if stream in copying:
            wait(self, stream)

    monkeypatch.setattr(streams.StreamEvent, "wait", waits)


# Whether a copy that does not wait is seen depends on the plan; large gradients, made by products, always leave.
WRONG = [(computing_does_not_wait, name) for name in WATCHED] + [(copies_do_not_wait, "wide")]


@pytest.mark.parametrize("what_is_wrong, name", WRONG)
def test_missing_waits_are_seen(what_is_wrong, name, cache_dir, monkeypatch):
    """The tests above would fail if the runtime did not wait."""
    with training(WATCHED[name], cache_dir) as loop:
        bytes_in = loop.step().bytes_in
        what_is_wrong(loop, monkeypatch)
        found = poisoned(loop, bytes_in)
        monkeypatch.undo()
    assert found > 0, "the stand-in does not see what does not wait"
