"""Links between host and device: their copy rates, from hardware files or measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LinkRates:
    """Copy rates between host and device in bytes per second; `both` is the sum of both directions at once."""

    in_bytes_per_s: float
    out_bytes_per_s: float
    both_bytes_per_s: float


_COPY_BYTES = 16 * 2**20
_COPIES = 3  # timed copies, after a first one that does not count


def measure_link(device: Any) -> LinkRates:
    """Time copies in, out and both at once.

    Parameters
    ----------
    device: a runtime device.

    Returns: rates in bytes per second.
    """
    # Ones, since all pages that were never written are the same page, which stays in the processor's cache.
    host = device.pinned(torch.ones(_COPY_BYTES, dtype=torch.uint8))
    inside, back = device.empty_like(host), device.empty_host_like(host)

    def timed(*starts: Callable[[], Any]) -> float:
        taken = []
        for _ in range(_COPIES + 1):
            start = time.perf_counter()
            for event in [s() for s in starts]:
                event.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    def bring() -> Any:
        return device.copy_in(inside, host, ())

    def send() -> Any:
        return device.copy_out(back, inside, ())

    alone_in, alone_out, both = timed(bring), timed(send), timed(bring, send)
    return LinkRates(_COPY_BYTES / alone_in, _COPY_BYTES / alone_out, 2 * _COPY_BYTES / both)
