"""What really happened: the schedule's actions with times and bytes, recorded while the executor walks them.

A device without a recorder pays one comparison per action and per job. With one, the executor's thread notes when it
took an action and what the ledger said; each worker notes when it began and ended a job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..solver.machine import Resource
from ..solver.schedule import Action, Schedule
from ..solver.simulate import Event
from .ledger import Ledger


class Taken(NamedTuple):
    """One action on the executor's thread: when it was taken and done with, and the bytes on the device.

    `start_bytes` and `end_bytes` are the level before and after it, `high_bytes` the most meanwhile, with workspaces.
    """

    action: Action
    start_s: float
    end_s: float
    start_bytes: int
    high_bytes: int
    end_bytes: int


@dataclass(frozen=True)
class Recording:
    """One iteration; seconds count from its start.

    Parameters
    ----------
    schedule: what was replayed. fixed_bytes: on the device beside it.
    walks: the actions of every forward, backward and of the turn-around, in order.
    jobs: what workers did for them; a job may end after the iteration.
    tails: jobs of before that ended in this iteration; they may have begun before it, at negative seconds.
    """

    schedule: Schedule
    fixed_bytes: int
    walks: tuple[tuple[Taken, ...], ...]
    jobs: tuple[Event, ...]
    tails: tuple[Event, ...]

    @property
    def step_s(self) -> float:
        """Seconds from the start of the first forward to the end of the turn-around, the user's code included."""
        return max((taken.end_s for walk in self.walks for taken in walk), default=0.0)


class _Job:
    """A job that a worker will do; its times are set by the worker."""

    __slots__ = ("action", "bytes", "end_s", "resource", "start_s")

    def __init__(self, action: Action, resource: Resource, size_bytes: int) -> None:
        self.action, self.resource, self.bytes = action, resource, size_bytes
        self.start_s = self.end_s = 0.0

    def ran(self, since_s: float) -> Event:
        return Event(self.action, self.resource, self.start_s - since_s, self.end_s - since_s, self.bytes)


class Recorder:
    """Records iterations and keeps the last whole one.

    State: `_whole`, the last whole iteration; `_walks` and `_jobs`, those of the one under way, and `_before`, the jobs
    of the one before it; `_action`, which is being taken. Changed on the executor's thread; workers set the times of
    their own jobs.

    Parameters
    ----------
    ledger: of the device whose executor is recorded.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._action: Action | None = None
        self._walks: list[list[Taken]] = []
        self._jobs: list[_Job] = []
        self._before: list[_Job] = []
        self._schedule: Schedule | None = None
        self._fixed_bytes = 0
        self._whole: tuple[Schedule, int, list[list[Taken]], list[_Job], list[_Job]] | None = None

    def begin(self, schedule: Schedule, actions: tuple[Action, ...]) -> None:
        """The executor starts to walk a part of a schedule."""
        if actions is schedule.passes[0].forward:
            self._walks, self._jobs, self._before = [[]], [], self._jobs
            self._schedule, self._fixed_bytes = schedule, self._ledger.fixed_bytes
        elif schedule is not self._schedule:
            # Micro-batches of several shapes go by several schedules: there is no one iteration to show.
            self._walks = []
        elif self._walks:
            self._walks.append([])

    def take(self, action: Action, handler: Callable[[str], None]) -> None:
        """Carry out an action and note it; outside a walk (when an iteration is loaded) only the jobs it starts."""
        ledger, self._action = self._ledger, action
        start_bytes, peak_bytes = ledger.level_bytes, ledger.peak_bytes
        ledger.peak_bytes = start_bytes
        start_s = time.perf_counter()
        try:
            handler(action.name)
        finally:
            end_s, high_bytes = time.perf_counter(), ledger.peak_bytes
            ledger.peak_bytes = max(peak_bytes, high_bytes)
            self._action = None
        if self._walks:
            self._walks[-1].append(Taken(action, start_s, end_s, start_bytes, high_bytes, ledger.level_bytes))

    def end(self, schedule: Schedule, actions: tuple[Action, ...]) -> None:
        """The executor has walked a part of a schedule; after the turn-around the iteration is whole."""
        if actions is schedule.turn_around and self._walks:
            self._whole = (schedule, self._fixed_bytes, self._walks, self._jobs, self._before)
            self._walks = []

    def watched(self, resource: Resource, size_bytes: int, work: Callable[[], None]) -> Callable[[], None]:
        """The same work, for a worker, noted as a job of the action that is being taken."""
        if self._action is None:
            return work
        job = _Job(self._action, resource, size_bytes)
        self._jobs.append(job)

        def timed() -> None:
            job.start_s = time.perf_counter()
            try:
                work()
            finally:
                job.end_s = time.perf_counter()

        return timed

    def recording(self) -> Recording | None:
        """The last whole iteration, None if there is none yet. No job of it may be under way."""
        if self._whole is None:
            return None
        schedule, fixed_bytes, walks, jobs, before = self._whole
        since_s = walks[0][0].start_s
        return Recording(
            schedule,
            fixed_bytes,
            tuple(tuple(t._replace(start_s=t.start_s - since_s, end_s=t.end_s - since_s) for t in w) for w in walks),
            tuple(job.ran(since_s) for job in jobs),
            tuple(job.ran(since_s) for job in before if job.end_s > since_s),
        )
