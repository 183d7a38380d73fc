"""Moments on the host and in an accelerator's streams, on one axis of seconds."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch

from .current import stream_on

_TRIES = 3  # attempts at a tie; the one that the host learns of soonest counts

Moment = float | torch.Event  # seconds of the host's clock, or a timed event in a stream, perhaps yet to happen


class Tie(NamedTuple):
    """An event and the host's seconds when it happened; None for a clock that only knows the host's seconds."""

    event: torch.Event | None
    host_s: float

    def seconds(self, moment: Moment) -> float:
        """Convert a moment to seconds of the host's clock; an event must have happened."""
        if isinstance(moment, float):
            return moment
        assert self.event is not None, "only a clock that is tied to the host's by an event makes events"
        return self.host_s + float(self.event.elapsed_time(moment)) / 1e3


class Clock(Protocol):
    """Notes the times of work where it is done."""

    def tie(self) -> Tie:
        """Return a tie that converts moments noted around now to seconds of the host's clock."""
        ...

    def mark(self, stream: torch.Stream | None = None) -> Moment:
        """Return the moment when all work launched until now is done, on a stream or on the device's current one."""
        ...


class HostClock:
    """A clock for devices whose work is done when the call returns."""

    def tie(self) -> Tie:
        return Tie(None, 0.0)

    def mark(self, stream: torch.Stream | None = None) -> Moment:
        return time.perf_counter()


class StreamClock:
    """A clock that records events in streams; nothing waits for them.

    Parameters
    ----------
    device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # An otherwise empty stream: an event in it happens at once, whatever the other streams still have to do.
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
        event.record(stream_on(self._device, stream))
        return event


def clock_of(device: torch.device) -> Clock:
    """Return the clock for the work of a device."""
    return HostClock() if device.type == "cpu" else StreamClock(device)
