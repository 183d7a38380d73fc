"""Resources in simulated time: compute, one link each way, and the CPU, each taking jobs in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from .problem import Rates


class Resource(Enum):
    """What takes time; the value is the word for tables."""

    COMPUTE = "compute"
    IN = "copy in"
    OUT = "copy out"
    CPU = "cpu"


class Stall(NamedTuple):
    """A span in which the executor waits, and the resource that it waits for."""

    cause: Resource
    start_s: float
    end_s: float


class Job:
    """One piece of work: seconds it takes alone, and the jobs it waits for. The machine sets its times."""

    __slots__ = ("bytes", "done", "end_s", "left_s", "resource", "start_s", "waits")

    def __init__(self, resource: Resource, seconds: float, size: int, waits: list[Job]) -> None:
        self.resource = resource
        self.bytes = size
        self.left_s = seconds
        self.waits = waits
        self.start_s = -1.0
        self.end_s = -1.0
        self.done = False


class Machine:
    """Time and queues. Only `submit`, `run` and `wait` change it; time passes in the last two.

    A job runs when it is the first of its resource's queue and what it waits for is done. Where both links together
    exceed their total rate both slow down in proportion; on shared cores each of k running resources has 1/k.

    Parameters
    ----------
    rates: link rates, and whether the resources share cores.
    """

    def __init__(self, rates: Rates) -> None:
        self.now = 0.0
        self.stall_s: dict[Resource, float] = dict.fromkeys(Resource, 0.0)
        self.stalls: list[Stall] = []
        self._rates = rates
        self._queues: dict[Resource, deque[Job]] = {resource: deque() for resource in Resource}

    def submit(self, resource: Resource, seconds: float, size: int = 0, waits: Iterable[Job] = ()) -> Job:
        """Queue a job of `seconds` on a resource behind what is there, after the jobs `waits`."""
        job = Job(resource, seconds, size, list(waits))
        self._queues[resource].append(job)
        return job

    def run(self, seconds: float) -> Job:
        """Compute for `seconds`; everything else that can run does so meanwhile."""
        job = self.submit(Resource.COMPUTE, seconds)
        while not job.done:
            self._advance()
        return job

    def wait(self, jobs: Iterable[Job]) -> None:
        """Let time pass until all jobs are done; the seconds count as stalls of what they wait for."""
        for job in jobs:
            while not job.done:
                cause, before = self._cause(job), self.now
                self._advance()
                self.stall_s[cause] += self.now - before
                self.stalls.append(Stall(cause, before, self.now))

    def skip(self, seconds: float) -> None:
        """Let time pass in which nothing ends: a span that repeats is not simulated again."""
        self.now += seconds
        for queue in self._queues.values():
            if queue and queue[0].start_s >= 0:
                queue[0].start_s += seconds

    def _cause(self, job: Job) -> Resource:
        """The resource that keeps `job` from being done: the one that runs, at the end of what it waits for."""
        while True:
            job = self._queues[job.resource][0]
            waiting = next((w for w in job.waits if not w.done), None)
            if waiting is None:
                return job.resource
            job = waiting

    def _advance(self) -> None:
        """Let time pass until the next job is done."""
        running = [queue[0] for queue in self._queues.values() if queue and all(w.done for w in queue[0].waits)]
        speed = self._speeds(running)
        passed, first = min(((job.left_s / s, i) for i, (job, s) in enumerate(zip(running, speed))))
        for job, s in zip(running, speed):
            if job.start_s < 0:
                job.start_s = self.now
            job.left_s = max(0.0, job.left_s - passed * s)
        self.now += passed
        ended = running[first]
        ended.done, ended.end_s = True, self.now
        ended.waits = []
        self._queues[ended.resource].popleft()

    def _speeds(self, running: list[Job]) -> list[float]:
        """The part of its full speed at which each job runs."""
        share = 1.0 / len(running) if self._rates.shared_cores else 1.0
        kinds = {job.resource for job in running}
        link = share
        if Resource.IN in kinds and Resource.OUT in kinds:
            total = self._rates.in_bytes_per_s + self._rates.out_bytes_per_s
            link = min(share, self._rates.both_bytes_per_s / total)
        return [link if job.resource in (Resource.IN, Resource.OUT) else share for job in running]
