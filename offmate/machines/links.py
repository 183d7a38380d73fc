"""Links between host and device: their copy rates, from hardware files or measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..runtime.clocks import clock_of
from ..runtime.devices.device import Device
from ..runtime.trace import RecordedJob, Recorder
from ..solver.resources import Resource
from ..solver.schedule import Action, Kind
from .curve import DIRECTIONS, Copied, fitted


@dataclass(frozen=True)
class LinkRates:
    """Rates of the way between host and device, in bytes per second.

    Parameters
    ----------
    both_bytes_per_s: the sum of both directions at once.
    host_memory_bytes_per_s: what the host's memory gives to copies and host updates together; 0 if it limits neither.
    manage_s: H, seconds per step in which the CPU manages everything else and makes no updates.
    per_copy_s: seconds that each copy takes in addition to those of its bytes.
    """

    in_bytes_per_s: float
    out_bytes_per_s: float
    both_bytes_per_s: float
    host_memory_bytes_per_s: float = 0.0
    manage_s: float = 0.0
    per_copy_s: float = 0.0

    def figures(self) -> dict[str, float]:
        """Return what is known by name: rates in whole bytes per second, seconds to a tenth of a microsecond."""
        known = {name: value for name, value in vars(self).items() if value}
        return {name: round(one) if name.endswith("bytes_per_s") else round(one, 7) for name, one in known.items()}


_MIB = 1 << 20
_SIZES_BYTES = (_MIB // 64, _MIB // 16, _MIB, 16 * _MIB)  # of the copies that are timed
_LARGEST_ON_CARD_BYTES = 256 * _MIB  # the host's part in starting a copy then no longer counts
_PART_OF_CARD = 8  # the largest copy takes at most one part in so many of what may be taken of a card
_QUEUED = 8  # copies that are started one after another
_QUEUED_BYTES = 32 * _MIB  # of these together, if they are large
_REPEATS = 3  # timed runs, after a first one that does not count
_WARM_S = 0.5  # seconds of copies after which a card's link has reached its speed
_SHORTEST_S = 1e-9  # of a timed run, where a clock is too coarse to see any
_COPY = Action(0, Kind.COMPUTE, "copies")  # the action that timed copies are said to belong to
_COPY_BYTES = 16 * _MIB
_COPIES = 3  # timed runs beside an update, after a first one that does not count
_UPDATED = 2**24  # float32 parameters of a timed update
_UPDATE_BYTES = 28  # of memory that AdamW moves per float32 parameter
_UNDISTURBED = 1.05  # work that takes no longer than this, relative to what it takes alone, was not slowed down


def measure_link(device: Device) -> LinkRates:
    """Time copies in, out and both at once, of several sizes.

    Parameters
    ----------
    device: a runtime device.

    Returns: rates in bytes per second, and seconds per copy.
    """
    return LinkRates(**asdict(fitted(measure_copies(device, _sizes_bytes(device), _REPEATS))))


def _sizes_bytes(device: Device) -> tuple[int, ...]:
    """Return the sizes to be timed: large ones on a card whose memory, and what a budget leaves of it, allow them."""
    where = device.torch_device
    if where.type != "cuda":
        return _SIZES_BYTES
    free, total = torch.accelerator.get_memory_info(where)
    allowed = int(torch.cuda.get_per_process_memory_fraction(where) * total) - torch.accelerator.memory_reserved(where)
    largest = min(_LARGEST_ON_CARD_BYTES, min(free, allowed) // _PART_OF_CARD)
    return (*_SIZES_BYTES, largest) if largest > _SIZES_BYTES[-1] else _SIZES_BYTES


def measure_copies(device: Device, sizes_bytes: Iterable[int], repeats: int) -> list[Copied]:
    """Time copies of several sizes in each direction, and one each way at the same time.

    Several copies are started one after another, as a plan does, and the time from the first one's start to the last
    one's end counts: by events in the streams on an accelerator, and by the host's clock otherwise. So a copy's own
    seconds include what the runtime takes to start it, if that is longer than the copy, but not the wait for its end.

    Parameters
    ----------
    device: a runtime device without a recorder. repeats: timed runs for each size and direction; the best one counts.
    """
    return [
        Copied(direction, size, bytes_per_s)
        for size in sizes_bytes
        for direction, bytes_per_s in _measure_size(device, size, repeats)
    ]


def _measure_size(device: Device, size_bytes: int, repeats: int) -> Iterator[tuple[str, float]]:
    # Ones, since all pages that were never written are the same page, which stays in the processor's cache.
    host = device.pinned(torch.ones(size_bytes, dtype=torch.uint8))
    inside, back = device.empty_like(host).fill_(1), device.empty_host_like(host).fill_(1)
    copies = max(1, min(_QUEUED, _QUEUED_BYTES // size_bytes))
    for direction in DIRECTIONS:
        # Where the CPU emulates the device, the copy out must not read what the copy in writes at the same time.
        leaves = host if direction == "both" and device.torch_device.type == "cpu" else inside

        def start(direction: str = direction, leaves: torch.Tensor = leaves) -> None:
            events = []
            for _ in range(copies):
                events += [device.copy_in(inside, host, ())] if direction != "out" else []
                events += [device.copy_out(back, leaves, ())] if direction != "in" else []
            for event in events:
                event.synchronize()

        _warm_up(device, start)
        best_s = min(_span_s(device, start) for _ in range(repeats))
        yield direction, (2 if direction == "both" else 1) * copies * size_bytes / best_s


def _warm_up(device: Device, start: Callable[[], None]) -> None:
    until = time.perf_counter() + (_WARM_S if device.torch_device.type == "cuda" else 0.0)
    start()
    while time.perf_counter() < until:
        start()


class _Jobs(Recorder):
    """Records all copies that a device makes, whatever they are for."""

    def __init__(self, device: Device) -> None:
        self._by = clock_of(device.torch_device)
        super().__init__(device.ledger, self._by)
        self._tied = self._by.tie()
        self._copies: list[RecordedJob] = []

    def job(self, resource: Resource, size_bytes: int) -> RecordedJob:
        """Record a copy."""
        self._copies.append(RecordedJob(_COPY, resource, size_bytes, self._by))
        return self._copies[-1]

    def span_s(self) -> float:
        """Return the seconds from the first copy's start to the last one's end."""
        spans = [ran for job in self._copies if (ran := job.ran(self._tied, 0.0)) is not None]
        return max(ran.end_s for ran in spans) - min(ran.start_s for ran in spans)


def _span_s(device: Device, start: Callable[[], None]) -> float:
    """Return the seconds of the copies that `start` makes and waits for."""
    jobs = device.recorder = _Jobs(device)
    try:
        start()
    finally:
        device.recorder = None
    return max(jobs.span_s(), _SHORTEST_S)


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
