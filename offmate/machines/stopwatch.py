"""Timers for work on the host or on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock_of(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a function that runs work and returns how many seconds it took on a device.

    On an accelerator these are the device's own seconds between two events: the time of launches is hidden as long as
    the device is kept busy.
    """
    return _host_s if device.type == "cpu" else _Stopwatch(device)


def _host_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class _Stopwatch:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, work: Callable[[], object]) -> float:
        start, end = (torch.Event(device=self._device, enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
