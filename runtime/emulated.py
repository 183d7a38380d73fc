"""The CPU plays the device: a ledger with a hard limit, copies and updates on their own threads, optional link rates.

Same executor, same schedule, same events as on a real device; only the memory is the host's own.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..solver.machine import Resource
from .device import Event
from .ledger import Ledger
from .trace import Recorder


class ThreadEvent:
    """The completion of a job on a thread."""

    def __init__(self) -> None:
        self._happened = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        self._happened.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._happened.is_set()

    def settle(self, error: BaseException | None = None) -> None:
        """It has happened, or `error` has kept it from happening."""
        self._error = error
        self._happened.set()


class _Job(NamedTuple):
    work: Callable[[], None]
    after: tuple[Event, ...]
    event: ThreadEvent


class _Lane:
    """One thread that does one job at a time: of those whose events have happened the one submitted first.

    State: `_jobs`, those not begun; `_busy`, whether one is under way; `_closing`. All are changed under `_changed`,
    which the lanes of a device share: a job waits for events of these lanes only.

    Parameters
    ----------
    name: of the thread. n_threads: that its work may use. changed: notified of every job that comes or is done.
    """

    def __init__(self, name: str, n_threads: int, changed: threading.Condition) -> None:
        self._jobs: list[_Job] = []
        self._busy = self._closing = False
        self._changed = changed
        self._n_threads = n_threads
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"offmate-{name}", daemon=True)
        everybody = torch.get_num_threads()
        self._thread.start()
        self._ready.wait()
        _set_default_threads(everybody)

    def submit(self, work: Callable[[], None], after: tuple[Event, ...]) -> ThreadEvent:
        event = ThreadEvent()
        with self._changed:
            self._jobs.append(_Job(work, after, event))
            self._changed.notify_all()
        return event

    def _run(self) -> None:
        # Sets the number that threads without any take when they first ask or compute, and takes it for this one.
        torch.set_num_threads(self._n_threads)
        torch.get_num_threads()
        self._ready.set()
        while (job := self._next()) is not None:
            failed = None
            try:
                for earlier in job.after:
                    earlier.wait()
                with torch.no_grad():
                    job.work()
            except BaseException as error:
                failed = error
            with self._changed:
                self._busy = False
                job.event.settle(failed)
                self._changed.notify_all()
            del job, failed

    def _next(self) -> _Job | None:
        """The first job that is ready, once there is one; None when the lane is closed and all are done."""
        with self._changed:
            while self._jobs or not self._closing:
                for i, job in enumerate(self._jobs):
                    if all(earlier.done() for earlier in job.after):
                        self._busy = True
                        return self._jobs.pop(i)
                self._changed.wait()
        return None

    def drain(self) -> None:
        """Wait until all jobs are done, failed or not."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and not self._busy)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # A job may have held the last reference to the device.
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)


def _set_default_threads(number: int) -> None:
    """What threads take that have no number yet, the training thread perhaps: bits of small products depend on it."""
    setter = threading.Thread(target=torch.set_num_threads, args=(number,))
    setter.start()
    setter.join()


class EmulatedDevice:
    """A device that is the CPU itself.

    Parameters
    ----------
    limit_bytes: the budget that its ledger keeps.
    link_bytes_per_s: rate of each copy direction; None copies as fast as the memory allows.
    """

    def __init__(self, limit_bytes: int, link_bytes_per_s: float | None = None) -> None:
        self.ledger = Ledger(limit_bytes)
        self.recorder: Recorder | None = None
        self._link_bytes_per_s = link_bytes_per_s
        changed = threading.Condition()
        self._in = _Lane("copy-in", 1, changed)
        self._out = _Lane("copy-out", 1, changed)
        self._update = _Lane("update", 1, changed)
        # A thread that is still inside a kernel when the interpreter goes away aborts the process, so whoever forgets
        # to close the device has it done when nothing refers to it any more, at the latest at exit.
        self._close = weakref.finalize(self, _close_lanes, (self._in, self._out, self._update))

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype)

    def empty_host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: tuple[Event, ...]) -> Event:
        return self._in.submit(self._copies(Resource.IN, target, source), after)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, after: tuple[Event, ...]) -> Event:
        return self._out.submit(self._copies(Resource.OUT, target, source), after)

    def _copies(self, resource: Resource, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        return self._watched(resource, source.numel() * source.element_size(), lambda: self._copy(target, source))

    def _watched(self, resource: Resource, size_bytes: int, work: Callable[[], None]) -> Callable[[], None]:
        return work if self.recorder is None else self.recorder.watched(resource, size_bytes, work)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        start = time.perf_counter()
        target.copy_(source)
        if self._link_bytes_per_s is not None:
            due = start + source.numel() * source.element_size() / self._link_bytes_per_s
            time.sleep(max(0.0, due - time.perf_counter()))

    def update_on_host(self, work: Callable[[], None], after: tuple[Event, ...]) -> Event:
        return self._update.submit(self._watched(Resource.CPU, 0, work), after)

    def drain(self) -> None:
        for lane in (self._in, self._out, self._update):
            lane.drain()

    def close(self) -> None:
        self._close()


def _close_lanes(lanes: tuple[_Lane, ...]) -> None:
    for lane in lanes:
        lane.close()
