"""Threads that do jobs, each the first submitted of those that can begin."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from ..events import Event, LaneEvent


class _Queued(NamedTuple):
    work: Callable[[], None]
    after: tuple[Event, ...]
    event: LaneEvent


class Lane:
    """One thread that does one job at a time: of the jobs whose events have happened, the one submitted first.

    A lane that polls does its jobs in the order in which they are submitted. To ask for the events of all of them again
    and again would take Python's lock away from the thread that launches work on the device.

    State: `_jobs`, the jobs not begun; `_busy`, whether one is under way; `_closing`. All are changed under `_changed`.

    Parameters
    ----------
    name: of the thread. n_threads: number of threads that its work may use.
    changed: condition notified of every job that is submitted or done; lanes whose jobs wait for each other share it.
    launches: whether its jobs only launch work on a stream, so that they may begin once a stream can wait for their
        events.
    poll_s: interval in seconds at which events on a device, which notify nobody, are polled; None if there are none.
    niceness: by how much the priority of the thread, and of those with which it computes, is lower than the process's.
    """

    def __init__(
        self,
        name: str,
        n_threads: int,
        changed: threading.Condition,
        launches: bool = False,
        poll_s: float | None = None,
        niceness: int = 0,
    ) -> None:
        self._jobs: list[_Queued] = []
        self._busy = self._closing = False
        self._changed, self._launches, self._poll_s = changed, launches, poll_s
        self._n_threads, self._niceness = n_threads, niceness
        self._process = os.getpid()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"offmate-{name}", daemon=True)
        everybody = torch.get_num_threads()
        self._thread.start()
        self._ready.wait()
        _set_default_threads(everybody)

    def submit(self, work: Callable[[], None], after: tuple[Event, ...]) -> LaneEvent:
        """Have `work` done once the events `after` have happened."""
        event = LaneEvent()
        with self._changed:
            self._jobs.append(_Queued(work, after, event))
            self._changed.notify_all()
        return event

    def _run(self) -> None:
        if self._niceness:  # before there is any thread of a kernel, which takes over the priority
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self._niceness)
        # Sets the default for threads that have none yet, and makes this thread adopt it.
        torch.set_num_threads(self._n_threads)
        torch.get_num_threads()
        self._ready.set()
        while (job := self._next()) is not None:
            event, failed = job.event, self._do(job)
            # Who waits for the event may count on the memory of the job's tensors, so it must not be held any more.
            del job
            with self._changed:
                self._busy = False
                event.settle(failed)
                self._changed.notify_all()
            del event, failed

    def _do(self, job: _Queued) -> BaseException | None:
        """Do a job after those that it waits for; return the error if it fails."""
        try:
            for earlier in () if self._launches else job.after:
                earlier.synchronize()
            with torch.no_grad():
                job.work()
        except BaseException as error:
            return error
        return None

    def _next(self) -> _Queued | None:
        """Return the first job that can begin, once there is one; None once the lane is closed and its jobs done."""
        with self._changed:
            while self._jobs or not self._closing:
                candidates = self._jobs if self._poll_s is None else self._jobs[:1]
                for i, job in enumerate(candidates):
                    if all(e.ready() if self._launches else e.done() for e in job.after):
                        self._busy = True
                        return self._jobs.pop(i)
                self._changed.wait(self._poll_s if self._jobs else None)
        return None

    def drain(self) -> None:
        """Wait until all jobs are done, failed or not."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and not self._busy)

    def close(self) -> None:
        """Stop the thread once its jobs are done; do nothing in a forked child, which has no such thread."""
        if os.getpid() != self._process:  # in a forked child a lock may be held for ever
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # A job may have held the last reference to the device, so that this runs on its own thread.
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)


def close_all(lanes: Iterable[Lane]) -> None:
    """Close several lanes."""
    for lane in tuple(lanes):
        lane.close()


def _set_default_threads(number: int) -> None:
    """Set the number that threads without one adopt, such as the training thread; bits of products depend on it."""
    setter = threading.Thread(target=torch.set_num_threads, args=(number,))
    setter.start()
    setter.join()
