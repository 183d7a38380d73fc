"""Ctrl-C held back to moments at which nothing is half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class _Held:
    """State: how often Ctrl-C was pressed since holding began, and who handles it otherwise."""

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
    """Hold Ctrl-C back during the body, but for `checkpoint`; afterwards it takes its usual course.

    Does nothing on other threads than the main one, inside another `held`, and where Ctrl-C has no Python handler.
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
    """Let a held Ctrl-C happen here.

    Parameters
    ----------
    patient: only if it was pressed twice, since stopping here leaves some parameters an update ahead of others.
    """
    if _held.presses > patient and threading.current_thread() is threading.main_thread():
        _held.deliver()
