"""A device with its own streams and memory: CUDA's, and any other that torch's device-neutral names support."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from ...solver.resources import HOST, Resource
from ..current import stream_on
from ..events import Event
from ..layouts import without_repeats
from ..ledger import Ledger
from ..memory.arena import Arena
from ..storage.file_bytes import BytesInFile, WritableBytes
from ..trace import RecordedJob, Recorder
from . import staging
from .cores import worker_threads
from .from_files import FromFiles
from .lanes import Lane, close_all
from .pinned import PinnedMemory, flat_bytes
from .ring import BUFFERS_BYTES
from .staging import Staging
from .stream_events import LateEvent, StreamEvent
from .to_files import ToFiles

_POLL_S = 2e-4  # interval at which the update worker polls for gradients under way
_NICENESS = 5  # of workers: the thread that launches on the device comes first


class _Direction:
    """One direction between host and device: its stream, and the thread for copies that cannot start at once."""

    def __init__(
        self, device: torch.device, resource: Resource, name: str, changed: threading.Condition, staging: Staging
    ) -> None:
        self.resource, self._staging = resource, staging
        self.stream = torch.Stream(device)
        self.lane = Lane(name, 1, changed, launches=True)
        self._turn = threading.Lock()

    def launch(
        self, target: torch.Tensor, source: torch.Tensor, before: tuple[Event, ...], job: RecordedJob | None
    ) -> StreamEvent:
        """Put a copy between the device and pinned memory into the stream."""
        with self._turn:
            self._begin(before, job)
            with self.stream:
                target.copy_(source, non_blocking=True)
            return self._end(job)

    def launch_staged(
        self, target: torch.Tensor, source: torch.Tensor, before: tuple[Event, ...], job: RecordedJob | None
    ) -> StreamEvent:
        """Copy between the device and memory that is not pinned, in pieces; the last may be under way on return."""
        flat_target, flat_source = flat_bytes(target), flat_bytes(source)
        with self._turn:
            self._begin(before, job)
            if flat_target is None or flat_source is None or not self._staging.exists:
                with self.stream:
                    target.copy_(source)
            elif source.device.type == "cpu":
                self._staging.bring(flat_target, flat_source, self.stream)
            else:
                self._staging.send(flat_target, flat_source, self.stream)
            return self._end(job)

    def _begin(self, before: tuple[Event, ...], job: RecordedJob | None) -> None:
        for event in before:
            event.wait(self.stream)
        if job is not None:
            job.begins(self.stream)

    def _end(self, job: RecordedJob | None) -> StreamEvent:
        if job is not None:
            job.ends(self.stream)
        return StreamEvent(self.stream)


class _ToDevice:
    """Copies pieces of files on to the device, each as soon as it has been read and `now` has happened."""

    def __init__(self, way: _Direction, now: StreamEvent) -> None:
        self._way, self._now = way, now

    def __call__(self, target: torch.Tensor, piece: torch.Tensor, read: Event, job: RecordedJob | None) -> Event:
        event = LateEvent()

        def work() -> None:
            read.synchronize()
            event.reached(self._way.launch(target, piece, (self._now,), job))

        event.launched = self._way.lane.submit(work, (read,))
        return event


class StreamDevice:
    """An accelerator that computes on torch's current stream and copies on two further streams.

    A copy is launched at once if all events that it waits for are in streams. If it waits for the CPU, or for memory
    that cannot be pinned, one thread per direction launches it, so that the executor's thread is not blocked.

    Parameters
    ----------
    device: an accelerator with its index. limit_bytes: the budget that its ledger enforces, and beyond which the
        allocator reserves nothing.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.torch_device = device
        self.ledger = Ledger(limit_bytes)
        self.recorder: Recorder | None = None
        self.arena = Arena(device)
        staging.reserve()  # before the pool takes all that can be pinned
        self.host_memory = PinnedMemory()
        self._capped: list[torch.device] = []
        self.limit(limit_bytes)
        self.changed = threading.Condition()
        # Copies of each direction run concurrently with compute and with those of the other direction.
        self._ways = {
            Resource.IN: _Direction(device, Resource.IN, "copy-in", self.changed, staging.INTO),
            Resource.OUT: _Direction(device, Resource.OUT, "copy-out", self.changed, staging.OUT_OF),
        }
        self._workers: dict[Resource, Lane] = {}
        self._from_files: dict[bool, FromFiles] = {}  # by whether what they read is in RAM
        self._to_files: ToFiles | None = None
        self._file_lanes: list[Lane] = []
        self._host_lanes: dict[Resource, Lane] = {}
        self.update_threads = worker_threads()
        self._worker(Resource.CPU)
        lanes = tuple(way.lane for way in self._ways.values())
        self._close = weakref.finalize(self, _close, lanes, self._workers, self._file_lanes, self._capped)

    def _worker(self, resource: Resource) -> Lane:
        """Return the thread of a worker, made on first use."""
        if resource not in self._workers:
            name = "update" if resource == Resource.CPU else resource
            self._workers[resource] = Lane(name, self.update_threads, self.changed, poll_s=_POLL_S, niceness=_NICENESS)
        return self._workers[resource]

    def limit(self, limit_bytes: int) -> None:
        self.ledger.limit_bytes = limit_bytes
        _, total = torch.accelerator.get_memory_info(self.torch_device)
        if limit_bytes < total:
            _cap(self.torch_device, limit_bytes / total)
            self._capped[:] = [self.torch_device]

    # -- memory -------------------------------------------------------------------------------------------------------

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        span = 1 + sum((size - 1) * stride for size, stride in zip(host.shape, host.stride()))
        self.arena.room((span * host.element_size(),))
        tensor = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self.torch_device)
        self.arena.note(tensor, alone=True)
        return tensor

    def empty_host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.host_memory.empty_strided(tensor.shape, tensor.stride(), tensor.dtype)

    def empty_on(self, tier: str, tensor: torch.Tensor) -> torch.Tensor:
        if tier != HOST:
            raise ValueError(f"{self.torch_device} has no tier {tier!r}; items can leave it only to the {HOST}")
        return self.empty_host_like(tensor)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        own = self.empty_like(tensor)
        target, source = without_repeats(own, tensor)
        if source.device.type == "cpu" and not source.is_pinned():
            # A copy from pageable memory would block the thread until the stream has reached it.
            staged = self.host_memory.staged(source)
            target.copy_(staged, non_blocking=staged is not source)
        else:
            target.copy_(source, non_blocking=True)
        return own

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        if host.is_pinned():
            return host
        return self.empty_host_like(host).copy_(host)

    # -- work ---------------------------------------------------------------------------------------------------------

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: tuple[Event, ...], link: Resource = Resource.IN
    ) -> Event:
        event = self._copy(self._ways[link], target, source, source, after)
        self.arena.copied(target, event)
        return event

    @property
    def file_buffers_bytes(self) -> int:
        return BUFFERS_BYTES if self._to_files is None else 2 * BUFFERS_BYTES

    def read_in(
        self, target: torch.Tensor, source: BytesInFile, link: Resource, after: tuple[Event, ...] = ()
    ) -> Event:
        into = flat_bytes(target)
        assert into is not None
        if source.in_ram not in self._from_files:
            casts = FromFiles("casts", self.changed, self.update_threads, _NICENESS) if source.in_ram else None
            self._from_files[source.in_ram] = casts or FromFiles("from-files", self.changed)
            self._file_lanes.append(self._from_files[source.in_ram].lane)
        now = StreamEvent(stream_on(self.torch_device))  # work launched until now may still use the target's memory
        launch = _ToDevice(self._ways[Resource.IN], now)
        event = self._from_files[source.in_ram].bring(into, source, after, launch, self.recorder, link)
        self.arena.copied(target, event)
        return event

    def write_out(
        self, target: WritableBytes, source: torch.Tensor, after: tuple[Event, ...], link: Resource
    ) -> tuple[Event, Event]:
        own, way = flat_bytes(source), self._ways[Resource.OUT]
        assert own is not None
        if self._to_files is None:
            self._to_files = ToFiles(self.changed)
            self._file_lanes.extend(self._to_files.lanes)
        now = StreamEvent(stream_on(self.torch_device))  # work launched until now may still make the source

        def launch(piece: torch.Tensor, part: torch.Tensor, job: RecordedJob | None) -> Event:
            return way.launch(piece, part, (now, *after), job)

        left, written = self._to_files.send(target, own, after, launch, self.recorder, link)
        self.arena.copied(source, left)
        return left, written

    def transfer(self, start: Callable[[], Event], size: int, link: Resource, after: tuple[Event, ...]) -> Event:
        if link not in self._host_lanes:
            self._host_lanes[link] = Lane(link.replace(" ", "-"), 1, self.changed)
            self._file_lanes.append(self._host_lanes[link])

        def whole() -> None:
            start().synchronize()

        work = whole if self.recorder is None else self.recorder.watched(link, size, whole)
        return self._host_lanes[link].submit(work, after)

    def copy_out(
        self, target: torch.Tensor, source: torch.Tensor, after: tuple[Event, ...], link: Resource = Resource.OUT
    ) -> Event:
        event = self._copy(self._ways[link], target, source, target, after)
        self.arena.copied(source, event)
        return event

    def _copy(
        self, way: _Direction, target: torch.Tensor, source: torch.Tensor, host: torch.Tensor, after: tuple[Event, ...]
    ) -> Event:
        # Work launched until now may still use the target's memory, or make the source.
        now = StreamEvent(stream_on(self.torch_device))
        before: tuple[Event, ...] = (now, *after)
        job = None if self.recorder is None else self.recorder.job(way.resource, source.nbytes)
        pinned = host.is_pinned()
        if pinned and all(event.ready() for event in before):
            return way.launch(target, source, before, job)
        event = LateEvent()

        def work() -> None:
            event.reached((way.launch if pinned else way.launch_staged)(target, source, before, job))

        event.launched = way.lane.submit(work, before)
        return event

    def update_on_host(
        self, work: Callable[[], None], after: tuple[Event, ...], worker: Resource = Resource.CPU
    ) -> Event:
        if self.recorder is not None:
            work = self.recorder.watched(worker, 0, work)
        return self._worker(worker).submit(work, after)

    def drain(self) -> None:
        for lane in (*self._workers.values(), *self._file_lanes, *(way.lane for way in self._ways.values())):
            lane.drain()
        if self._to_files is not None:
            self._to_files.synchronize()
        streams = (way.stream for way in self._ways.values())
        for stream in (*streams, stream_on(self.torch_device)):
            stream.synchronize()

    def close(self) -> None:
        self._close()


def _cap(device: torch.device, fraction: float) -> None:
    """Limit the allocator to this part of the device, if it can be told."""
    module = torch.get_device_module(device)
    if hasattr(module, "set_per_process_memory_fraction"):
        module.set_per_process_memory_fraction(fraction, device)


def _close(
    copies: tuple[Lane, ...], workers: dict[Resource, Lane], files: list[Lane], capped: list[torch.device]
) -> None:
    close_all((*workers.values(), *files, *copies))  # each before those that it gives work
    for device in capped:
        _cap(device, 1.0)
