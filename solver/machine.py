"""Resources in simulated time: each does one job at a time, of the ready ones the oldest first."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from .resources import Rates, Resource
from .sharing import Speeds


class Stall(NamedTuple):
    """A span in which the executor waits, and the resource that it waits for."""

    cause: Resource
    start_s: float
    end_s: float


class Job:
    """A piece of work: its seconds when it runs alone, and the jobs that it waits for. The machine sets its times."""

    __slots__ = ("bytes", "done", "end_s", "followers", "left_s", "number", "resource", "start_s", "waits")

    def __init__(self, resource: Resource, number: int, seconds: float, size: int) -> None:
        self.resource = resource
        self.number = number
        self.bytes = size
        self.left_s = seconds
        self.waits: list[Job] = []  # those that it waits for and that are not done
        self.followers: list[Job] = []  # those that wait for it
        self.start_s = -1.0
        self.end_s = -1.0
        self.done = False


class Machine:
    """Time and queues. Only `submit`, `run`, `wait` and `skip` change it; time passes in the last three.

    A resource does one job at a time, to its end. Of the jobs that wait for nothing more it takes the one submitted
    first. Resources that work at the same time may slow each other down; see `Speeds`.

    Parameters
    ----------
    rates: the resources, the rates of their links, and whether all share cores.
    """

    def __init__(self, rates: Rates) -> None:
        self.now = 0.0
        self.stall_s: dict[Resource, float] = dict.fromkeys(rates.resources, 0.0)
        self.stalls: list[Stall] = []
        self._submitted = 0
        self._waiting_s: dict[Resource, float] = dict.fromkeys(rates.resources, 0.0)  # of jobs that are not ready
        self._running: dict[Resource, Job | None] = dict.fromkeys(rates.resources)
        self._ready: dict[Resource, list[tuple[int, Job]]] = {resource: [] for resource in rates.resources}
        self._memory = rates.host_memory_shares
        self._speeds = Speeds(rates)

    def submit(self, resource: Resource, seconds: float, size: int = 0, waits: Iterable[Job] = ()) -> Job:
        """Submit a job of `seconds` to a resource, to begin after the jobs `waits`."""
        job = Job(resource, self._submitted, seconds, size)
        self._submitted += 1
        for earlier in waits:
            if not earlier.done:
                job.waits.append(earlier)
                earlier.followers.append(job)
        if job.waits:
            self._waiting_s[resource] += seconds
        else:
            heappush(self._ready[resource], (job.number, job))
            self._take_up(resource)
        return job

    def run(self, seconds: float) -> Job:
        """Compute for `seconds`; everything else that can run does so meanwhile."""
        job = self.submit(Resource.COMPUTE, seconds)
        while not job.done:
            self.advance()
        return job

    def wait(self, jobs: Iterable[Job]) -> None:
        """Let time pass until all jobs are done; the seconds count as stalls, by the resource waited for."""
        for job in jobs:
            while not job.done:
                cause, before = _cause(job), self.now
                self.advance()
                self.stall_s[cause] += self.now - before
                self.stalls.append(Stall(cause, before, self.now))

    def skip(self, seconds: float) -> None:
        """Advance the clock without ending any job, for a repeated span that is not simulated again."""
        self.now += seconds
        for job in self._running.values():
            if job is not None:
                job.start_s += seconds

    def ready_s(self, resource: Resource) -> float:
        """Return the seconds that a resource, running alone, takes for its ready jobs."""
        running = self._running[resource]
        return (running.left_s if running else 0.0) + sum(job.left_s for _, job in self._ready[resource])

    def submitted_s(self, resource: Resource) -> float:
        """Return the seconds of the jobs that have been submitted to a resource and are not done."""
        return self._waiting_s[resource] + self.ready_s(resource)

    def _take_up(self, resource: Resource) -> None:
        """Have an idle resource start the first of its ready jobs."""
        ready = self._ready[resource]
        if ready and self._running[resource] is None:
            job = self._running[resource] = heappop(ready)[1]
            job.start_s = self.now

    def advance(self) -> None:
        """Let time pass until the next job is done."""
        running = [job for job in self._running.values() if job is not None]
        if len(running) == 1 and self._memory.get(running[0].resource, 0.0) <= 1.0:  # the usual case, at full speed
            first, passed = running[0], running[0].left_s
            first.left_s = 0.0
        else:
            # Plain loops: a dry run spends much of its time here.
            speeds = self._speeds.of(tuple([job.resource for job in running]))
            first, passed = running[0], running[0].left_s / speeds[0]
            for job, speed in zip(running, speeds):
                takes_s = job.left_s / speed
                if takes_s < passed:
                    first, passed = job, takes_s
            for job, speed in zip(running, speeds):
                left_s = job.left_s - passed * speed
                job.left_s = left_s if left_s > 0.0 else 0.0
        self.now += passed
        self._end(first)

    def _end(self, job: Job) -> None:
        """Mark a job as done, make its followers ready that wait for nothing else, and let idle resources start."""
        job.done, job.end_s = True, self.now
        self._running[job.resource] = None
        followers, job.followers = job.followers, []
        freed = [job.resource]
        for follower in followers:
            follower.waits.remove(job)
            if not follower.waits:
                self._waiting_s[follower.resource] -= follower.left_s
                heappush(self._ready[follower.resource], (follower.number, follower))
                freed.append(follower.resource)
        for resource in freed:
            if self._running[resource] is None and self._ready[resource]:
                self._take_up(resource)


def _cause(job: Job) -> Resource:
    """Return the resource that delays `job`: that of the job at the end of its chain of waits."""
    while job.waits:
        job = job.waits[0]
    return job.resource
