"""Moments on the host and in an accelerator's streams, on one axis of seconds."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch

_TRIES = 3  # of which the one counts that the host was told of soonest

Moment = float | torch.Event  # seconds of the host's clock, or an event in a stream that has or will have a time


class Tie(NamedTuple):
    """An event and the host's seconds when it happened; None for a clock that knows the host's seconds only."""

    event: torch.Event | None
    host_s: float

    def seconds(self, moment: Moment) -> float:
        """A moment in seconds of the host's clock; an event must have happened."""
        if isinstance(moment, float):
            return moment
        assert self.event is not None, "events come from a clock that is tied to the host's by one"
        return self.host_s + float(self.event.elapsed_time(moment)) / 1e3


class Clock(Protocol):
    """Notes when things happen where they happen."""

    def tie(self) -> Tie:
        """What turns moments noted around now into seconds of the host's clock."""
        ...

    def mark(self, stream: torch.Stream | None = None) -> Moment:
        """The moment at which everything launched until now is done, on a stream or on the current one."""
        ...


class HostClock:
    """Where work is done when the call returns."""

    def tie(self) -> Tie:
        return Tie(None, 0.0)

    def mark(self, stream: torch.Stream | None = None) -> Moment:
        return time.perf_counter()


class StreamClock:
    """Notes events in streams; nothing waits for them.

    Parameters
    ----------
    device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Holds nothing else, so that an event in it happens at once, whatever the others still have to do.
        self._stream = torch.Stream(device)

    def tie(self) -> Tie:
        tries = []
        for _ in range(_TRIES):
            start_s = time.perf_counter()
            event = self._event(self._stream)
            event.synchronize()
            end_s = time.perf_counter()
            tries.append((end_s - start_s, Tie(event, end_s)))
        return min(tries, key=lambda one: one[0])[1]

    def mark(self, stream: torch.Stream | None = None) -> Moment:
        return self._event(stream)

    def _event(self, stream: torch.Stream | None) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(stream)
        return event


def clock_of(device: torch.device) -> Clock:
    """The clock for what a device does."""
    return HostClock() if device.type == "cpu" else StreamClock(device)
