"""Timers for work on the host or on a device, and for launching it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..runtime.current import stream_on

_FILLER_S = 3e-4  # longer than the host needs to launch any one operator
_SIDE = 512  # rows and columns of the matrices whose product fills the device
_TRIED = 10

_fills: dict[torch.device, int] = {}
"""How many products keep a device busy for long enough."""


def clock_of(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a function that runs work and returns how many seconds it took on a device.

    On an accelerator these are the device's own seconds between two events. Other work is put before the first, so that
    the device does not wait for launches of up to 0.3 ms.
    """
    return _host_s if device.type == "cpu" else _Stopwatch(device)


def launching_s(work: Callable[[], object], device: torch.device) -> float:
    """Return how many seconds the host needs to launch work on a device that is idle; 0 if the device is the host."""
    if device.type == "cpu":
        return 0.0
    stream_on(device).synchronize()
    return _host_s(work)


def _host_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class _Stopwatch:
    """Times work on a device; the matrices that keep it busy before are freed with the stopwatch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._matrix, self._product = (torch.ones(_SIDE, _SIDE, device=device) for _ in range(2))
        if device not in _fills:
            self._fill(_TRIED)  # the first product loads its kernel
            once_s = _between_events_s(lambda: self._fill(_TRIED), device) / _TRIED
            _fills[device] = max(1, round(_FILLER_S / max(once_s, 1e-7)))

    def __call__(self, work: Callable[[], object]) -> float:
        self._fill(_fills[self._device])
        return _between_events_s(work, self._device)

    def _fill(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._matrix, self._matrix, out=self._product)


def _between_events_s(work: Callable[[], object], device: torch.device) -> float:
    start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    start.record(stream_on(device))
    work()
    end.record(stream_on(device))
    end.synchronize()
    return start.elapsed_time(end) / 1e3
