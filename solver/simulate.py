"""The dry run of a schedule: exact bytes at every action, and seconds on compute, copies in and out, and CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from .arrivals import Arrivals, Place
from .effects import Effect, effect
from .items import Item, ItemKind
from .machine import Job, Machine, Stall
from .problem import RING_PIECES, Problem
from .resources import Resource
from .schedule import Action, Kind, Schedule, takes_on_host

_ITERATIONS = 3  # by the third, the work that one iteration leaves to the next has settled


@dataclass(frozen=True)
class BusySpan:
    """The time that one resource spent on one action; seconds from the start of the iteration.

    A span may end after its iteration, since work continues into the next one. Of the middle micro-batches the first
    stands for all.
    """

    action: Action
    resource: Resource
    start_s: float
    end_s: float
    bytes: int


@dataclass(frozen=True)
class Simulation:
    """One steady iteration.

    Parameters
    ----------
    step_s: seconds of the iteration.
    peak_bytes, peak_action: the most bytes on the device, and the first action that reaches them.
    timeline: the spans of all resources, in the order of the actions.
    stall_s: seconds for which the executor waited, by the resource that it waited for.
    stalls: these waits one by one, in order; a long wait may be several. Of the middle micro-batches only those of the
        first.
    taken: per action of the schedule, the seconds at which the executor takes it and is done with it; it is done with a
        queued copy at once.
    memory: per action, its index and the most bytes on the device while it is carried out.
    """

    step_s: float
    peak_bytes: int
    peak_action: Action
    timeline: tuple[BusySpan, ...]
    stall_s: dict[str, float]
    stalls: tuple[Stall, ...]
    taken: tuple[tuple[float, float], ...]
    memory: tuple[tuple[int, int], ...]


def memory_highs(schedule: Schedule) -> list[int]:
    """Return the most bytes on the device during each action: its level plus the action's rise."""
    level = sum(schedule.item_bytes[item] for item in schedule.resident)
    highs = []
    for action in schedule.actions:
        does = effect(action, schedule)
        highs.append(level + does.rise_bytes)
        level += does.growth_bytes
    return highs


def keeps_budgets(problem: Problem, schedule: Schedule) -> bool:
    """Return whether a schedule stays within the problem's budgets."""
    fits = all(used <= tier.capacity_bytes for tier, (_, used) in zip(problem.tiers, schedule.tiers))
    return fits and max(memory_highs(schedule)) <= problem.device_budget_bytes


def room_bytes(schedule: Schedule) -> dict[str, int]:
    """Return the bytes by which each compute could rise further, by name, without raising the schedule's peak."""
    highs = memory_highs(schedule)
    peak = max(highs)
    room: dict[str, int] = {}
    for action, high in zip(schedule.actions, highs):
        if action.kind is Kind.COMPUTE:
            room[action.name] = min(room.get(action.name, peak), peak - high)
    return room


def simulate(schedule: Schedule) -> Simulation:
    """Run a schedule dry until it is steady.

    The executor takes actions in order. Computes and device updates block it, and wait for the copies of what they
    read; frees block it until the item's copies are done; everything else is queued on its resource. The gate waits for
    all gradients on their way to the host. Two of the middle micro-batches are run; the second, which starts from a
    settled state, counts for all others.

    Parameters
    ----------
    schedule: a valid schedule; see `validate`.

    Returns: the last of a few iterations.
    """
    executor = DryRun(schedule)
    start = 0.0
    for _ in range(_ITERATIONS):
        start = executor.machine.now
        executor.iterate()
    end, stall_s, stalls = executor.machine.now, dict(executor.machine.stall_s), tuple(executor.machine.stalls)
    jobs, taken = tuple(executor.jobs), tuple(executor.taken)
    executor.finish(job for _, job in jobs)
    highs = memory_highs(schedule)
    peak = max(highs)
    return Simulation(
        step_s=end - start,
        peak_bytes=peak,
        peak_action=schedule.actions[highs.index(peak)],
        timeline=tuple(
            BusySpan(action, job.resource, job.start_s - start, job.end_s - start, job.bytes) for action, job in jobs
        ),
        stall_s={str(resource): seconds for resource, seconds in stall_s.items()},
        stalls=tuple(Stall(s.cause, s.start_s - start, s.end_s - start) for s in stalls),
        taken=tuple((began - start, ended - start) for began, ended in taken),
        memory=tuple(enumerate(highs)),
    )


class DryRun:
    """Takes actions in order.

    State: the machine's queues. `arriving`, `leaving`: by item, its latest copy to the device, and to the host.
    `on_host`: by item, the latest job that makes or changes its copy on the host. `used_up`: by item that shares host
    memory, the latest job after which its place is free. `jobs` and `taken`: those of this iteration. `_ring`: the
    writes after which pieces of states in the ring make room; `_updated`: the latest update of such a piece.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.machine = Machine(schedule.rates)
        self.arriving: dict[Item, Job] = {}
        self.leaving: dict[Item, Job] = {}
        self.on_host: dict[Item, Job] = {}
        self.used_up: dict[Item, Job] = {}
        self.buffers = _Buffers(schedule)
        self._ring: deque[Job] = deque()
        self._updated: Job | None = None
        self.jobs: list[tuple[Action, Job]] = []
        self.taken: list[tuple[float, float]] = []
        self._step: int | None = None

    def iterate(self) -> None:
        """Run one iteration; `jobs`, `taken` and the machine's stalls are then its own."""
        self.jobs, self.taken, self._step = [], [], None
        self.machine.stall_s, self.machine.stalls = dict.fromkeys(self.schedule.rates.resources, 0.0), []
        for _, group in groupby(self.schedule.parts, key=lambda part: (part.of_pass, part.times)):
            parts = list(group)
            actions = tuple(action for part in parts for action in part.actions)
            self._walk(actions)
            if parts[0].times > 1:
                self._repeat(actions, parts[0].times - 1)

    def finish(self, jobs: Iterable[Job]) -> None:
        """Continue with another iteration until jobs are done, since its work competes with them."""
        left = [job for job in jobs if not job.done]
        for action in self.schedule.actions if left else ():
            self._walk((action,))
            left = [job for job in left if not job.done]
            if not left:
                return
        self.machine.wait(left)

    def _repeat(self, middle: tuple[Action, ...], times: int) -> None:
        """Run the middle pass once more, and let the clock advance as if it were run `times` more."""
        machine = self.machine
        jobs, taken, stalls = list(self.jobs), list(self.taken), list(machine.stalls)
        before, stalled = machine.now, dict(machine.stall_s)
        self._walk(middle)
        self.jobs, self.taken, machine.stalls = jobs, taken, stalls
        machine.skip((times - 1) * (machine.now - before))
        for resource, seconds in machine.stall_s.items():
            machine.stall_s[resource] += (times - 1) * (seconds - stalled[resource])

    def _walk(self, actions: Iterable[Action]) -> None:
        manage_s = self.schedule.rates.manage_s
        for action in actions:
            if action.step != self._step and manage_s > 0:
                self.machine.submit(Resource.CPU, manage_s)
            self._step, began = action.step, self.machine.now
            self.take(action)
            self.taken.append((began, self.machine.now))

    def has_to_wait(self, does: Effect) -> bool:
        """Return whether the executor would wait before it carries out an action that blocks it."""
        for jobs, items in ((self.arriving, does.awaits_arrival), (self.leaving, does.awaits_departure)):
            for job in map(jobs.get, items):
                if job is not None and not job.done:
                    return True
        return bool(does.host_reads and self.sources(does))

    def _waits(self, does: Effect) -> list[Job]:
        waits = _undone(self.arriving, does.awaits_arrival)
        if does.awaits_departure:
            waits += _undone(self.leaving, does.awaits_departure)
        return waits + self.sources(does) if does.host_reads else waits

    def sources(self, does: Effect) -> list[Job]:
        """Return the jobs that still write the host copies that an action reads."""
        return _undone(self.on_host, does.host_reads)

    def take(self, action: Action) -> None:
        """Carry out one action."""
        does = effect(action, self.schedule)
        if does.blocks:
            self.machine.wait(self._waits(does))
            if does.resource is not None:
                self.jobs.append((action, self.machine.run(does.seconds)))
            return
        waits = _undone(self.arriving, does.reads) if does.reads else []
        if does.host_reads:
            waits += self.sources(does)
        if action.kind is Kind.OFFLOAD and action.item.kind is ItemKind.GRADIENT:
            waits += self.buffers.fill(action.item.name)
        place = takes_on_host(action)
        if place is not None:
            waits += _undone(self.used_up, self.schedule.host_layout.neighbours.get(place, ()))
        assert does.resource is not None
        if action.kind in (Kind.UPDATE_CPU, Kind.SPECULATE_CPU):
            self.buffers.end(action.name)
        if does.stages:
            self._update_from_files(action, does, waits)
            return
        begins = action.kind is Kind.ACCUMULATE_CPU and not self.buffers.has_begun(action.name)
        job = self.machine.submit(does.resource, 0.0 if begins else does.seconds, does.moved_bytes, waits)
        self.jobs.append((action, job))
        last = job
        if does.beyond is not None:
            last = self.machine.submit(does.beyond, does.beyond_s, does.moved_bytes, (job,))
            self.jobs.append((action, last))
        if action.kind is Kind.ACCUMULATE_CPU:
            self.buffers.empty(action.name, job)
        for item in does.brings:
            self.arriving[item] = last
        for item in does.reads:  # what passes the host stays until the tier has it: the buffers on the way are few
            self.leaving[item] = last
        for item in does.host_writes:
            self.on_host[item] = last
        if action.kind is not Kind.OFFLOAD:
            self.used_up.update(dict.fromkeys(does.host_reads, job))

    def _update_from_files(self, action: Action, does: Effect, waits: list[Job]) -> None:
        """Submit an update on the host whose state passes the ring, piece by piece, after those submitted before."""
        assert does.resource is not None
        job = written = self._updated
        for stage in does.stages:
            free = [self._ring.popleft()] if len(self._ring) == RING_PIECES else []
            read = self.machine.submit(
                stage.into, stage.read_s, stage.bytes, free + _undone(self.on_host, (stage.item,))
            )
            after = [read, *waits, *([job] if job is not None else [])]
            job = self.machine.submit(does.resource, stage.update_s, 0, after)
            written = self.machine.submit(stage.out, stage.write_s, stage.bytes, (job,))
            self.jobs += [(action, read), (action, job), (action, written)]
            self._ring.append(written)
            self.on_host[stage.item] = written
        assert job is not None and written is not None
        self._updated, in_files = job, self.schedule.homes.keys()
        self.on_host.update((item, written if item in in_files else job) for item in does.host_writes)
        self.used_up.update(dict.fromkeys(does.host_reads, job))


class _Buffers:
    """The host buffers in which gradients arrive, until they are added to their totals.

    The first gradient after an update is the total: it has memory of its own, and nothing is added.

    State: `_begun`, the tensors that have a total; `_holds`, by tensor, the place of its gradient until its addition is
    queued; `_emptied`, places and the additions after which they may be used again.
    """

    def __init__(self, schedule: Schedule) -> None:
        sizes = {item.name: size for item, size in schedule.item_bytes.items() if item.kind is ItemKind.GRADIENT}
        self._sizes, self._arrivals = sizes, Arrivals(max(sizes.values(), default=0))
        self._begun: set[str] = set()
        self._holds: dict[str, Place] = {}
        self._emptied: list[tuple[Place, Job]] = []

    def fill(self, tensor: str) -> list[Job]:
        """Give a tensor's gradient its place, and return the jobs that its copy has to wait for."""
        if tensor not in self._begun:
            return []
        place = self._holds[tensor] = self._arrivals.place(self._sizes[tensor])
        self._emptied = [(other, addition) for other, addition in self._emptied if not addition.done]
        return [addition for other, addition in self._emptied if place.overlaps(other)]

    def empty(self, tensor: str, addition: Job) -> None:
        """Note that the addition of a tensor's gradient is queued, or that its total has begun."""
        if tensor in self._begun:
            self._emptied.append((self._holds.pop(tensor), addition))
        self._begun.add(tensor)

    def has_begun(self, tensor: str) -> bool:
        """Return whether a tensor has a total to which gradients are added."""
        return tensor in self._begun

    def end(self, tensor: str) -> None:
        """Note that a tensor's total is used, by an update."""
        self._begun.discard(tensor)


def _undone(jobs: dict[Item, Job], items: Iterable[Item]) -> list[Job]:
    """Return the latest jobs of these items that are not done."""
    return [job for job in map(jobs.get, items) if job is not None and not job.done]
