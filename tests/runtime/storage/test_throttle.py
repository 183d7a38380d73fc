"""Throttles: what is asked for at once is due one after another, in one direction or in both."""

from __future__ import annotations

import pytest
from offmate.runtime.storage import throttle as module
from offmate.runtime.storage.throttle import Throttle

from offmate.errors import ArgumentValueError


@pytest.mark.parametrize(
    ("shared", "due_s"),
    [(True, [101.0, 101.5, 102.5, 103.0]), (False, [101.0, 100.5, 102.0, 101.0])],
)
def test_a_throttle_is_busy_with_what_it_was_asked_for_before(monkeypatch, shared, due_s):
    monkeypatch.setattr(module.time, "perf_counter", lambda: 100.0)
    one = Throttle(read_bytes_per_s=1000, write_bytes_per_s=2000, shared=shared)
    assert [one.due_s(writes, 1000) for writes in (False, True, False, True)] == due_s
    monkeypatch.setattr(module.time, "perf_counter", lambda: 200.0)
    assert one.due_s(False, 500) == 200.5  # nothing is saved up


@pytest.mark.parametrize("rates", [(0, 1), (1, -1), (float("nan"), 1)])
def test_a_rate_is_positive(rates):
    with pytest.raises(ArgumentValueError, match="rates are positive"):
        Throttle(*rates)
