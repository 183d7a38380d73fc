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
    """Rates of the way between host and device, in bytes per second.

    Parameters
    ----------
    both_bytes_per_s: the sum of both directions at once.
    host_memory_bytes_per_s: what the host's memory gives to copies and host updates together; 0 if it limits neither.
    manage_s: H, seconds per step in which the CPU manages everything else and makes no updates.
    """

    in_bytes_per_s: float
    out_bytes_per_s: float
    both_bytes_per_s: float
    host_memory_bytes_per_s: float = 0.0
    manage_s: float = 0.0


_COPY_BYTES = 16 * 2**20
_COPIES = 3  # timed copies, after a first one that does not count
_UPDATED = 2**24  # float32 parameters of a timed update
_UPDATE_BYTES = 28  # of memory that AdamW moves per float32 parameter
_UNDISTURBED = 1.05  # work that takes no longer than this, relative to what it takes alone, was not slowed down


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


def measure_host_memory(device: Any, rates: LinkRates) -> float:
    """Time a host update with copies in both directions beside it.

    Parameters
    ----------
    device: a runtime device whose copies take none of the host's cores. rates: of its copies.

    Returns: bytes that the host's memory read and wrote per second for all of them; 0.0 if none slowed another down.
    """
    param = torch.nn.Parameter(torch.ones(_UPDATED))
    param.grad = torch.full_like(param, 1e-3)
    step = torch.optim.AdamW([param], fused=True).step
    host = device.pinned(torch.ones(_COPY_BYTES, dtype=torch.uint8))
    inside, back = device.empty_like(host), device.empty_host_like(host)

    def timed(copies: int) -> float:
        taken = []
        for _ in range(_COPIES + 1):
            start = time.perf_counter()
            events = [device.update_on_host(step, ())]
            for _ in range(copies):
                events += [device.copy_in(inside, host, ()), device.copy_out(back, inside, ())]
            for event in events:
                event.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    alone_s = timed(0)
    # As many copies as take the update's time: all then end together, however slow they are beside each other.
    copies = max(1, round(alone_s * rates.both_bytes_per_s / (2 * _COPY_BYTES)))
    moved = 2 * copies * _COPY_BYTES
    together_s = timed(copies)
    if together_s <= _UNDISTURBED * max(alone_s, moved / rates.both_bytes_per_s):
        return 0.0
    return (_UPDATE_BYTES * _UPDATED + moved) / together_s
