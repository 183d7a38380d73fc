"""Recording of what really happened: the schedule's actions with times and bytes, while the executor walks them.

A device without a recorder pays one comparison per action and per job. With one, every action and job is bracketed by
two moments where it runs: in the stream that computes or copies, or on the thread that works. Events in streams are
read when the recording is, and nothing waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..solver.resources import Resource
from ..solver.schedule import Action, Schedule
from ..solver.simulate import BusySpan
from .clocks import Clock, Moment, Tie
from .ledger import Ledger


class Taken(NamedTuple):
    """One action on the computing stream: the times of its start and end, and the bytes on the device.

    `start_bytes` and `end_bytes` are the level before and after it, `high_bytes` the most in between, including
    workspaces. `launch_start_s` and `launch_end_s` are times on the executor's thread: on an accelerator it is done
    with an action as soon as that has been launched.
    """

    action: Action
    start_s: float
    end_s: float
    start_bytes: int
    high_bytes: int
    end_bytes: int
    launch_start_s: float
    launch_end_s: float


class _Noted(NamedTuple):
    """An action whose moments are not known in seconds yet; the other fields are as in `Taken`."""

    action: Action
    start: Moment
    end: Moment
    start_bytes: int
    high_bytes: int
    end_bytes: int
    launch_start_s: float
    launch_end_s: float

    def taken(self, tie: Tie, since_s: float) -> Taken:
        start_s, end_s = (tie.seconds(moment) - since_s for moment in (self.start, self.end))
        launch = (self.launch_start_s - since_s, self.launch_end_s - since_s)
        return Taken(self.action, start_s, end_s, *self[3:6], *launch)


@dataclass(frozen=True)
class Recording:
    """One iteration; seconds count from its start.

    Parameters
    ----------
    schedule: the schedule that was replayed. fixed_bytes: bytes on the device that it does not count.
    walks: the actions of every forward, backward and of the turn-around, in order.
    jobs: the work of streams and workers for them; a job may end after the iteration.
    tails: earlier jobs that ended in this iteration; they may have begun before it, at negative seconds.
    """

    schedule: Schedule
    fixed_bytes: int
    walks: tuple[tuple[Taken, ...], ...]
    jobs: tuple[BusySpan, ...]
    tails: tuple[BusySpan, ...]

    @property
    def step_s(self) -> float:
        """Seconds from the start of the first forward to the end of the turn-around, the user's code included."""
        return max((taken.end_s for walk in self.walks for taken in walk), default=0.0)

    @property
    def launch_s(self) -> float:
        """Seconds for which the executor's thread was busy, its waits included."""
        return sum(walk[-1].launch_end_s - walk[0].launch_start_s for walk in self.walks if walk)


class RecordedJob:
    """A job for a worker or a stream; its moments are set where it is done.

    Parameters
    ----------
    action: the action that it is part of. resource: the one that does it. size_bytes: bytes that it moves.
    """

    __slots__ = ("_clock", "_end", "_start", "action", "bytes", "resource")

    def __init__(self, action: Action, resource: Resource, size_bytes: int, clock: Clock) -> None:
        self.action, self.resource, self.bytes, self._clock = action, resource, size_bytes, clock
        self._start: Moment | None = None
        self._end: Moment | None = None

    def begins(self, stream: torch.Stream) -> None:
        """Mark the start of the job: work put on the stream from now on belongs to it."""
        self._start = self._clock.mark(stream)

    def ends(self, stream: torch.Stream) -> None:
        """Mark the end of the job: work put on the stream since its start belongs to it."""
        self._end = self._clock.mark(stream)

    def begins_now(self) -> None:
        """Mark the start of the job on this thread."""
        self._start = time.perf_counter()

    def ends_now(self) -> None:
        """Mark the end of the job on this thread."""
        self._end = time.perf_counter()

    def do(self, work: Callable[[], None]) -> None:
        """Do this work as the job, now, on this thread."""
        self._start = time.perf_counter()
        try:
            work()
        finally:
            self._end = time.perf_counter()

    def ran(self, tie: Tie, since_s: float) -> BusySpan | None:
        """Return the span in which it was done; None if it was not."""
        if self._start is None or self._end is None:
            return None
        start_s, end_s = (tie.seconds(moment) - since_s for moment in (self._start, self._end))
        return BusySpan(self.action, self.resource, start_s, end_s, self.bytes)


class _Whole(NamedTuple):
    """A whole iteration, as recorded."""

    schedule: Schedule
    fixed_bytes: int
    tie: Tie
    walks: list[list[_Noted]]
    jobs: list[RecordedJob]
    before: list[RecordedJob]


class Recorder:
    """Records iterations and keeps the last whole one.

    State: `_whole`, the last whole iteration; `_walks`, `_jobs` and `_tie`, those of the one under way, and `_before`,
    the jobs of the one before it; `_action`, the action being taken. All of it changes on the executor's thread only;
    workers set the moments of their own jobs.

    Parameters
    ----------
    ledger: the ledger of the device whose executor is recorded. clock: the clock for the device's work.
    """

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger, self._clock = ledger, clock
        self._action: Action | None = None
        self._walks: list[list[_Noted]] = []
        self._jobs: list[RecordedJob] = []
        self._before: list[RecordedJob] = []
        self._schedule: Schedule | None = None
        self._fixed_bytes = 0
        self._tie = Tie(None, 0.0)
        self._whole: _Whole | None = None

    def begin(self, schedule: Schedule, actions: tuple[Action, ...]) -> None:
        """Note that the executor starts to walk a part of a schedule."""
        if actions is schedule.parts[0].actions:
            self._walks, self._jobs, self._before = [[]], [], self._jobs
            self._schedule, self._fixed_bytes = schedule, self._ledger.fixed_bytes
            # A new tie per iteration: clocks drift apart, and seconds between distant events are less exact.
            self._tie = self._clock.tie()
        elif schedule is not self._schedule:
            # Micro-batches of several shapes use several schedules: there is no single iteration to show.
            self._walks = []
        elif self._walks:
            self._walks.append([])

    def take(self, action: Action, handler: Callable[[Action], None]) -> None:
        """Carry out an action and record it; outside a walk (while an iteration is loaded) only the jobs it starts."""
        ledger, self._action = self._ledger, action
        start_bytes, peak_bytes = ledger.level_bytes, ledger.peak_bytes
        ledger.peak_bytes = start_bytes
        launch_start_s, start = time.perf_counter(), self._clock.mark()
        try:
            handler(action)
        finally:
            high_bytes = ledger.peak_bytes
            ledger.peak_bytes = max(peak_bytes, high_bytes)
            self._action = None
        if self._walks:
            end, launch_end_s = self._clock.mark(), time.perf_counter()
            levels = (start_bytes, high_bytes, ledger.level_bytes)
            self._walks[-1].append(_Noted(action, start, end, *levels, launch_start_s, launch_end_s))

    def end(self, schedule: Schedule, actions: tuple[Action, ...]) -> None:
        """Note that the executor has walked a part of a schedule; after the turn-around the iteration is whole."""
        if actions is schedule.turn_around and self._walks:
            self._whole = _Whole(schedule, self._fixed_bytes, self._tie, self._walks, self._jobs, self._before)
            self._walks = []

    def job(self, resource: Resource, size_bytes: int) -> RecordedJob | None:
        """Create a job of the action being taken, for the one that does it to time; None outside of actions."""
        if self._action is None:
            return None
        job = RecordedJob(self._action, resource, size_bytes, self._clock)
        self._jobs.append(job)
        return job

    def watched(self, resource: Resource, size_bytes: int, work: Callable[[], None]) -> Callable[[], None]:
        """Return the same work, for a worker's thread, recorded as a job of the action being taken."""
        job = self.job(resource, size_bytes)
        return work if job is None else lambda: job.do(work)

    def recording(self) -> Recording | None:
        """Return the last whole iteration, None if there is none yet; nothing of it may be under way."""
        if self._whole is None:
            return None
        schedule, fixed_bytes, tie, walks, jobs, before = self._whole
        since_s = tie.seconds(walks[0][0].start)
        tails = (job.ran(tie, since_s) for job in before)
        return Recording(
            schedule,
            fixed_bytes,
            tuple(tuple(noted.taken(tie, since_s) for noted in walk) for walk in walks),
            tuple(ran for job in jobs if (ran := job.ran(tie, since_s)) is not None),
            tuple(ran for ran in tails if ran is not None and ran.end_s > 0.0),
        )


def recorded(recorder: Recorder | None, resource: Resource, sizes: Iterable[int]) -> list[RecordedJob | None]:
    """Return what times each of some transfers over a link; None for each if nothing is recorded.

    Parameters
    ----------
    sizes: bytes of each.
    """
    return [None if recorder is None else recorder.job(resource, size) for size in sizes]
