"""Deferral of Ctrl-C to moments at which no operation is half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class _Held:
    """The presses of Ctrl-C since holding began, and the handler that was installed before."""

    def __init__(self) -> None:
        self.active = False
        self.presses = 0
        self.before: Any = None
        self.frame: FrameType | None = None

    def press(self, number: int, frame: FrameType | None) -> None:
        self.presses += 1
        self.frame = frame

    def deliver(self) -> None:
        self.presses, frame, self.frame = 0, self.frame, None
        self.before(signal.SIGINT, frame)


_held = _Held()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold Ctrl-C back during the body, except at `checkpoint`; afterwards deliver it to its usual handler.

    This does nothing on threads other than the main one, inside another `held`, or if Ctrl-C has no Python handler.
    """
    if _held.active or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    _held.active, _held.presses, _held.before = True, 0, before
    signal.signal(signal.SIGINT, _held.press)
    try:
        yield
        if _held.presses:
            _held.deliver()
    finally:
        signal.signal(signal.SIGINT, before)
        _held.active = False


def checkpoint(patient: bool) -> None:
    """Deliver a held Ctrl-C now.

    Parameters
    ----------
    patient: whether to deliver it only if it was pressed twice, since stopping now leaves some parameters an update
        ahead of others.
    """
    if _held.presses > patient and threading.current_thread() is threading.main_thread():
        _held.deliver()
