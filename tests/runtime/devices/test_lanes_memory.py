"""A lane holds nothing of a job that is done: who waits for the job may count on the memory of its tensors."""

from __future__ import annotations

import threading
import weakref

import pytest
from offmate.runtime.devices.lanes import Lane
from offmate.runtime.events import LaneEvent


class _Held:
    """Stands for the tensors of a copy."""


def test_what_a_job_used_is_free_before_its_event_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    held = _Held()
    known, alive, settle = weakref.ref(held), [], LaneEvent.settle

    def settled(event: LaneEvent, error: BaseException | None = None) -> None:
        alive.append(known())
        settle(event, error)

    monkeypatch.setattr(LaneEvent, "settle", settled)
    lane, begun = Lane("test", 1, threading.Condition()), threading.Event()
    try:
        event = lane.submit(lambda held=held: begun.wait() and None, ())
        del held
        begun.set()
        event.synchronize()
    finally:
        lane.close()
    assert alive == [None]
