"""The CPU as an emulated device: a ledger with a hard limit, copies and updates on threads, optional link rates.

Executor, schedule and events are the same as on a real device; only the memory is the host's own.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping

import torch

from ...solver.resources import Resource
from ..events import Event
from ..layouts import as_layout
from ..ledger import Ledger
from ..storage.file_bytes import BytesInFile, WritableBytes
from ..trace import Recorder
from .lanes import Lane, close_all
from .pinned import flat_bytes
from .stream_events import LateEvent

_TRANSFERS = Resource("file transfers")
_THREADS = {Resource.IN: "copy-in", Resource.OUT: "copy-out", Resource.CPU: "update"}


class EmulatedDevice:
    """A device that is the CPU itself.

    Parameters
    ----------
    limit_bytes: the budget that its ledger enforces.
    link_bytes_per_s: rate of all links, or rates by link; a link without one copies as fast as the memory allows.
    """

    def __init__(self, limit_bytes: int, link_bytes_per_s: float | Mapping[Resource, float] | None = None) -> None:
        self.ledger = Ledger(limit_bytes)
        self.torch_device = torch.device("cpu")
        self.recorder: Recorder | None = None
        self.arena = None
        self.update_threads = 1
        self._link_bytes_per_s = link_bytes_per_s
        self.changed = threading.Condition()
        self._lanes: dict[Resource, Lane] = {}
        for resource in (Resource.IN, Resource.OUT, Resource.CPU):
            self._lane(resource)
        # A thread that is still inside a kernel when the interpreter shuts down aborts the process. So a device that is
        # not closed is closed when nothing refers to it any more, at the latest at exit.
        self._close = weakref.finalize(self, close_all, self._lanes.values())

    def limit(self, limit_bytes: int) -> None:
        self.ledger.limit_bytes = limit_bytes

    def _lane(self, resource: Resource) -> Lane:
        """Return the thread of a link or worker, made on first use."""
        if resource not in self._lanes:
            self._lanes[resource] = Lane(_THREADS.get(resource, resource.replace(" ", "-")), 1, self.changed)
        return self._lanes[resource]

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return as_layout(tensor, tensor.shape, tensor.stride())

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def empty_host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def empty_on(self, tier: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty_host_like(tensor)

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: tuple[Event, ...], link: Resource = Resource.IN
    ) -> Event:
        return self._lane(link).submit(self._copies(link, target, source), after)

    @property
    def file_buffers_bytes(self) -> int:
        return 0  # both go straight between their places

    def read_in(
        self, target: torch.Tensor, source: BytesInFile, link: Resource, after: tuple[Event, ...] = ()
    ) -> Event:
        size = target.numel() * target.element_size()
        into = flat_bytes(target)
        assert into is not None

        def arrive() -> None:  # the device's memory is the host's own, so that the bytes are there already
            with self._at_rate(Resource.IN, size):
                pass

        there = self.transfer(lambda: source.read(into, 0), size, link, after)
        return self._lane(Resource.IN).submit(self._watched(Resource.IN, size, arrive), (there,))

    def write_out(
        self, target: WritableBytes, source: torch.Tensor, after: tuple[Event, ...], link: Resource
    ) -> tuple[Event, Event]:
        own = flat_bytes(source)
        assert own is not None
        size = own.numel()

        def leave() -> None:  # the device's memory is the host's own, and the file is written straight from it
            with self._at_rate(Resource.OUT, size):
                pass

        ready = self._lane(Resource.OUT).submit(self._watched(Resource.OUT, size, leave), after)
        written = self.transfer(lambda: target.write(own, 0), size, link, (ready,))
        return written, written

    def transfer(self, start: Callable[[], Event], size: int, link: Resource, after: tuple[Event, ...]) -> Event:
        # Several go on at once, since each of a few bytes keeps one disk busy at most. Those whose seconds are emulated
        # or recorded go one by one.

        def whole() -> None:
            with self._at_rate(link, size):
                start().synchronize()

        if self.recorder is not None or self._rate_of(link) is not None:
            return self._lane(link).submit(self._watched(link, size, whole), after)
        late = LateEvent()
        late.launched = self._lane(link).submit(lambda: late.reached(start()), after)
        return self._lane(_TRANSFERS).submit(lambda: None, (late,))  # so that draining the lanes waits for it

    def copy_out(
        self, target: torch.Tensor, source: torch.Tensor, after: tuple[Event, ...], link: Resource = Resource.OUT
    ) -> Event:
        return self._lane(link).submit(self._copies(link, target, source), after)

    def _copies(self, link: Resource, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        return self._watched(link, source.numel() * source.element_size(), lambda: self._copy(link, target, source))

    def _watched(self, resource: Resource, size_bytes: int, work: Callable[[], None]) -> Callable[[], None]:
        return work if self.recorder is None else self.recorder.watched(resource, size_bytes, work)

    def _copy(self, link: Resource, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._at_rate(link, source.numel() * source.element_size()):
            target.copy_(source)

    def _rate_of(self, link: Resource) -> float | None:
        rate = self._link_bytes_per_s
        return rate.get(link) if isinstance(rate, Mapping) else rate

    @contextlib.contextmanager
    def _at_rate(self, link: Resource, size_bytes: int) -> Iterator[None]:
        """Make the body last as long as a link takes for so many bytes."""
        start = time.perf_counter()
        yield
        bytes_per_s = self._rate_of(link)
        if bytes_per_s is not None:
            time.sleep(max(0.0, start + size_bytes / bytes_per_s - time.perf_counter()))

    def update_on_host(
        self, work: Callable[[], None], after: tuple[Event, ...], worker: Resource = Resource.CPU
    ) -> Event:
        return self._lane(worker).submit(self._watched(worker, 0, work), after)

    def drain(self) -> None:
        for lane in self._lanes.values():
            lane.drain()

    def close(self) -> None:
        self._close()
