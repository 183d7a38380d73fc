"""Deferral of Ctrl-C and of other signals to moments at which no operation is half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# What users, schedulers and timers send; to look at all signals would take a noticeable part of a short step.
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGVTALRM", "SIGBREAK")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class _Held:
    """The signals since holding began, and the handlers that were installed before."""

    def __init__(self) -> None:
        self.active = False
        self.waiting: list[tuple[int, FrameType | None]] = []
        self.before: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def arrive(self, number: int, frame: FrameType | None) -> None:
        self.waiting.append((number, frame))

    def deliver(self) -> None:
        while self.waiting:
            number, frame = self.waiting.pop(0)
            self.before[number](number, frame)

    def begin(self, handlers: dict[int, Callable[[int, FrameType | None], Any]]) -> None:
        self.active, self.waiting, self.before = True, [], handlers
        for number in handlers:
            signal.signal(number, self.arrive)

    def end(self) -> None:
        # A handler that is back may run at once, and raise: the others are put back all the same.
        try:
            while self.before:
                number, handler = next(iter(self.before.items()))
                if signal.getsignal(number) == self.arrive:  # else a handler has put another one in its place
                    signal.signal(number, handler)
                del self.before[number]
            self.active = False
            while self.waiting:
                signal.raise_signal(self.waiting.pop(0)[0])
        finally:
            if self.active or self.waiting:
                self.end()


_held = _Held()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold signals back during the body, except at `checkpoint`; afterwards deliver them to their usual handlers.

    The usual signals with a handler in Python count, since the handler may raise: a timeout's, or that of a scheduler
    that ends the job. This does nothing on threads other than the main one, inside another `held`, or without such
    handlers.
    """
    if _held.active or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    own = {number: handler for number, handler in handlers.items() if callable(handler)}
    if not own:
        yield
        return
    try:
        _held.begin(own)
        yield
        _held.deliver()
    finally:
        _held.end()


def checkpoint(patient: bool) -> None:
    """Deliver held signals now.

    Parameters
    ----------
    patient: whether to deliver them only if there are two, such as a second Ctrl-C, since stopping now leaves some
        parameters an update ahead of others.
    """
    if len(_held.waiting) > patient and threading.current_thread() is threading.main_thread():
        _held.deliver()
