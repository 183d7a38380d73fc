"""The threads of one disk, which do the requests of the oldest transfers first."""

from __future__ import annotations

import bisect
import functools
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import StorageError
from .disk_rates import DiskRates, MeanRates
from .host_bytes import AlignedBytes
from .open_file import OpenFile
from .throttle import Throttle
from .transfers import Part, Request, Transfer, Worker

REQUEST_BYTES = 1 << 22
"""The most that one call to the system transfers."""
N_THREADS = 4
"""Requests under way at once on a disk."""
DEADLINE_S = 120.0
"""Seconds without any progress after which a disk counts as hanging."""


@dataclass(frozen=True)
class Limits:
    """How an engine works.

    Parameters
    ----------
    n_threads: requests at once on each disk. request_bytes: the largest request, a multiple of 4,096.
    deadline_s: seconds without any progress on a disk after which its transfers fail.
    """

    n_threads: int = N_THREADS
    request_bytes: int = REQUEST_BYTES
    deadline_s: float = DEADLINE_S


class DiskUse(NamedTuple):
    """What a disk has done for the engine.

    Parameters
    ----------
    name: the folder, or the first file that was opened there. read_bytes, written_bytes: on the disk, whole blocks.
    read_busy_s, write_busy_s, busy_s: seconds in which reads, writes or either were under way.
    """

    name: str
    read_bytes: int
    written_bytes: int
    read_busy_s: float
    write_busy_s: float
    busy_s: float

    @property
    def read_bytes_per_s(self) -> float:
        """Return the mean rate of reads; 0 if there were none."""
        return self.read_bytes / self.read_busy_s if self.read_busy_s else 0.0

    @property
    def write_bytes_per_s(self) -> float:
        """Return the mean rate of writes; 0 if there were none."""
        return self.written_bytes / self.write_busy_s if self.write_busy_s else 0.0


class _Worker:
    """A `Worker` of a queue."""

    def __init__(self, queue: DiskQueue, buffer: AlignedBytes) -> None:
        self.buffer, self._queue = buffer, queue

    def read(self, file: OpenFile, address: int, n_bytes: int, offset: int, least_bytes: int) -> None:
        call = functools.partial(file.read, address, n_bytes, offset, least_bytes, self._queue.progressed)
        self._queue.count(False, n_bytes, call)

    def write(self, file: OpenFile, address: int, n_bytes: int, offset: int) -> None:
        call = functools.partial(file.write, address, n_bytes, offset, self._queue.progressed)
        self._queue.count(True, n_bytes, call)


class DiskQueue:
    """Threads that do requests to one disk.

    State: `_parts`, ready and in the order of their transfers; `_under_way`, the transfer of each thread at work;
    `_keys` of their requests; `_progress_s`, when something was last done; `_error`, with which transfers fail
    once the disk hangs or the queue is closed; `_closing`.
    All are changed under `_lock`, and so are the figures; `_changed` is notified of requests and of the closing.

    Parameters
    ----------
    name: of the disk, for messages. throttle: rates that it is held to.
    """

    def __init__(self, name: str, limits: Limits, throttle: Throttle | None = None) -> None:
        self.name, self.staging_bytes = name, limits.n_threads * limits.request_bytes
        self._throttle, self._deadline_s = throttle, limits.deadline_s
        self._parts: list[tuple[int, Part, Transfer]] = []
        self._under_way: dict[int, Transfer] = {}
        self._keys: set[Hashable] = set()
        self._progress_s, self._closing = time.monotonic(), False
        self._error: StorageError | None = None
        self._rates = DiskRates()
        self._lock = threading.RLock()  # collecting what nobody needs may close the queue at any moment
        self._changed = threading.Condition(self._lock)
        buffers = [AlignedBytes(limits.request_bytes) for _ in range(limits.n_threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(buffer,), name=f"offmate-disk-{i}", daemon=True)
            for i, buffer in enumerate(buffers)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, part: Part, transfer: Transfer) -> None:
        """Have the requests of a transfer done, whose events have happened."""
        if not part.requests:
            return
        with self._changed:
            error = self._error
            if error is None:
                bisect.insort(self._parts, (transfer.number, part, transfer), key=lambda entry: entry[0])
                self._changed.notify(len(part.requests))
                return
            part.drop(hangs=True)
        transfer.fail(StorageError(str(error)))  # one of its own, or the error would collect the frames of all who wait

    def count(self, writes: bool, n_bytes: int, call: Callable[[], None]) -> None:
        """Make a call to the disk, count it, and hold it to the throttle's rate."""
        with self._lock:
            mark = self._rates.begins(writes, time.perf_counter())
        done_bytes = 0
        try:
            due_s = 0.0 if self._throttle is None else self._throttle.due_s(writes, n_bytes)
            call()
            if due_s:
                time.sleep(max(0.0, due_s - time.perf_counter()))
            done_bytes = n_bytes
        finally:
            with self._lock:
                self._rates.ends(writes, done_bytes, mark, time.perf_counter())

    def progressed(self) -> None:
        """Note that the disk has done something."""
        self._progress_s = time.monotonic()

    def use(self) -> DiskUse:
        """Return what it has done until now."""
        with self._lock:
            return DiskUse(self.name, *self._rates.done_bytes, *self._rates.busy_s)

    def iteration_done(self) -> tuple[float, MeanRates]:
        """Note that an iteration has ended; return its seconds of work, and the rates of the last iterations."""
        with self._lock:
            return self._rates.iteration_done(time.perf_counter()), self._rates.means

    @property
    def means(self) -> MeanRates:
        """Return the rates of the last iterations."""
        with self._lock:
            return self._rates.means

    def fail_if_it_hangs(self) -> None:
        """End all transfers with an error if requests are under way and none has progressed for too long."""
        with self._lock:
            waited_s = time.monotonic() - self._progress_s
            if self._error is not None or not self._under_way or waited_s < self._deadline_s:
                return
            self._error = StorageError(
                f"{self.name} has done nothing for {waited_s:.0f} s, though {len(self._under_way)} requests are under "
                "way: the disk or its connection hangs. Look at the system's log (dmesg), check the connection, and "
                "start again, or name another folder"
            )
            hanging, dropped = set(self._under_way.values()), self._drop()
        for transfer in hanging | dropped:
            transfer.fail(StorageError(str(self._error)), at_once=True)

    def close(self, error: StorageError) -> bool:
        """End the threads after the requests under way; those not begun fail.

        Returns: whether all threads have ended; those that hang are waited for until the deadline.
        """
        with self._changed:
            self._closing = True
            dropped = self._drop()
            self._changed.notify_all()
            patience_s = 0.0 if self._error is not None else self._deadline_s
            self._error = self._error or error
        for transfer in dropped:
            transfer.fail(error)
        end_s = time.monotonic() + patience_s
        for thread in self._threads:
            if thread is not threading.current_thread():  # its request may have held the engine's last reference
                thread.join(max(0.0, end_s - time.monotonic()))
        with self._lock:
            hanging = set(self._under_way.values())
        for transfer in hanging:
            transfer.fail(error, at_once=True)
        return not hanging

    def _drop(self) -> set[Transfer]:
        """Forget the requests that have not begun; return their transfers."""
        dropped = {transfer for _, _, transfer in self._parts}
        for _, part, _ in self._parts:
            part.drop(hangs=self._error is not None)
        self._parts.clear()
        return dropped

    def _run(self, buffer: AlignedBytes) -> None:
        worker = _Worker(self, buffer)
        while (taken := self._next()) is not None:
            part, request, transfer = taken
            error = _done(worker, part, request)
            with self._lock:
                del self._under_way[threading.get_ident()]
                self._keys.discard(request.key)
                self._progress_s = time.monotonic()
            # Who waits for the transfer may count on the memory of its tensors.
            del taken, part, request
            transfer.end(error)
            del transfer, error

    def _next(self) -> tuple[Part, Request, Transfer] | None:
        """Return the first request that can begin, once there is one; None once the queue is closed."""
        with self._changed:
            while not self._closing:
                if (taken := self._take()) is not None:
                    if not self._under_way:
                        self._progress_s = time.monotonic()
                    self._under_way[threading.get_ident()] = taken[2]
                    self._keys.add(taken[1].key)
                    return taken
                self._changed.wait()
        return None

    def _take(self) -> tuple[Part, Request, Transfer] | None:
        at = 0
        while at < len(self._parts):
            _, part, transfer = self._parts[at]
            request = next((one for one in part.requests if one.key not in self._keys), None)
            if request is None:
                at += 1
                continue
            begins = transfer.begin()
            if begins:
                part.requests.remove(request)
            else:
                part.drop()
            if not part.requests:
                del self._parts[at]
            if begins:
                return part, request, transfer
        return None


def _done(worker: Worker, part: Part, request: Request) -> BaseException | None:
    """Do a request; return the error if it fails."""
    failure: BaseException | None = None
    try:
        request.work(worker, part.file())
    except BaseException as error:
        failure = error
    try:
        part.used(1)
    except StorageError as error:
        failure = failure or error
    return failure
