"""The dry run of a schedule: exact bytes at every action, and seconds over compute, copies in and out, and CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .machine import Job, Machine, Resource, Stall
from .schedule import Action, Kind, Pass, Schedule, update_items

_ITERATIONS = 3  # by the third what one iteration leaves to the next has settled


@dataclass(frozen=True)
class Event:
    """What one resource did for one action; seconds from the start of the iteration.

    An event of an iteration may end after it: tails run on into the next one. Of the middle micro-batches the first
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
    peak_bytes, peak_action: the most bytes on the device, and the first action that reaches it.
    timeline: what every resource did, in the order of the actions.
    stall_s: seconds in which the executor waited, by the resource that it waited for.
    stalls: those spans one by one, in order; a long wait may be several. Of the middle micro-batches only the first's.
    taken: per action of the schedule the seconds at which the executor takes it and is done with it; a queued copy is
        done at once.
    memory: per action its index and the most bytes on the device while it is carried out.
    """

    step_s: float
    peak_bytes: int
    peak_action: Action
    timeline: tuple[Event, ...]
    stall_s: dict[str, float]
    stalls: tuple[Stall, ...]
    taken: tuple[tuple[float, float], ...]
    memory: tuple[tuple[int, int], ...]


def memory_highs(schedule: Schedule) -> list[int]:
    """The most bytes on the device during each action: its level, and for a compute its rise on top."""
    sizes = schedule.item_bytes
    level = sum(sizes[item] for item in schedule.resident)
    totals: set[str] = set()
    highs = []
    for action in schedule.actions:
        high = level
        if action.kind is Kind.PREFETCH:
            high = level = level + sizes[action.name]
        elif action.kind is Kind.FREE:
            level -= sizes[action.name]
            totals.discard(action.name)
        elif action.kind is Kind.ACCUMULATE:
            total, gradient = f"t:{action.name}", f"g:{action.name}"
            level -= sizes[gradient] if total in totals else 0  # the first gradient becomes the total
            totals.add(total)
        elif action.kind is Kind.COMPUTE:
            spec = schedule.computes[action.name]
            high = level + spec.rise_bytes
            level += sum(sizes[item] for item in spec.makes) - sum(sizes[item] for item in spec.drops)
        highs.append(high)
    return highs


def room_bytes(schedule: Schedule) -> dict[str, int]:
    """By how much more each compute could rise, by name, without the schedule's peak being any higher."""
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
    read; frees block it until the item's copies are done; everything else is queued on its resource. The gate waits
    for all gradients on their way to the host. Of the middle micro-batches two are run, and the second, in which what
    the first one leaves has settled, counts for all others.

    Parameters
    ----------
    schedule: a valid schedule; see `validate`.

    Returns: the last of a few iterations.
    """
    executor = Executor(schedule)
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
            Event(action, job.resource, job.start_s - start, job.end_s - start, job.bytes) for action, job in jobs
        ),
        stall_s={resource.value: seconds for resource, seconds in stall_s.items()},
        stalls=tuple(Stall(s.cause, s.start_s - start, s.end_s - start) for s in stalls),
        taken=tuple((began - start, ended - start) for began, ended in taken),
        memory=tuple(enumerate(highs)),
    )


class Executor:
    """Takes actions in order; what it changes is the machine's queues and the last copies of every item."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.machine = Machine(schedule.rates)
        self.copy_in: dict[str, Job] = {}
        self.copy_out: dict[str, Job] = {}
        self.update: dict[str, Job] = {}  # the latest host update of a tensor
        self.totals: set[str] = set()  # tensors whose total on the device has begun
        self.sent = 0  # gradients that went out so far: two buffers take them in turn
        self.arriving: dict[str, int] = {}  # by tensor the number of its gradient, until its addition is queued
        self.adding: dict[str, Job] = {}  # by tensor its latest addition
        self.additions: dict[int, Job] = {}  # by number of a gradient its addition, until its buffer is used again
        self.jobs: list[tuple[Action, Job]] = []
        self.taken: list[tuple[float, float]] = []
        self._step: int | None = None

    def iterate(self) -> None:
        """One iteration; `jobs`, `taken` and the machine's stalls are then those of this iteration."""
        self.jobs, self.taken, self._step = [], [], None
        self.machine.stall_s, self.machine.stalls = dict.fromkeys(Resource, 0.0), []
        for p, one in enumerate(self.schedule.passes):
            self._walk(one.forward + one.backward)
            if p == 1 and self.schedule.micro_batches > 3:
                self._repeat(one, self.schedule.micro_batches - 3)
        self._walk(self.schedule.turn_around)

    def finish(self, jobs: Iterable[Job]) -> None:
        """Go on with another iteration until jobs are done: what it adds competes with them."""
        left = [job for job in jobs if not job.done]
        for action in self.schedule.actions if left else ():
            self._walk((action,))
            left = [job for job in left if not job.done]
            if not left:
                return
        self.machine.wait(left)

    def _repeat(self, middle: Pass, times: int) -> None:
        """The middle pass `times` more: once in fact, the rest of them as long as that."""
        machine = self.machine
        jobs, taken, stalls = list(self.jobs), list(self.taken), list(machine.stalls)
        before, stalled = machine.now, dict(machine.stall_s)
        self._walk(middle.forward + middle.backward)
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

    def waits(self, action: Action) -> list[Job]:
        """The jobs under way that the executor waits for before, or while, it carries out an action."""
        name = action.name
        if action.kind is Kind.COMPUTE:
            waits = _those(self.copy_in, self.schedule.computes[name].needs)
            if name == "gate":
                waits += [job for item, job in self.copy_out.items() if item.startswith("g:") and not job.done]
                waits += [job for job in self.additions.values() if not job.done]
            return waits
        if action.kind is Kind.UPDATE_DEVICE:
            # It writes over what an earlier copy to the host may still read.
            items = update_items(name, self.schedule.states)
            return _those(self.copy_in, items) + _those(self.copy_out, items)
        if action.kind is Kind.FREE:
            return _those(self.copy_in, (name,)) + _those(self.copy_out, (name,))
        return []

    def take(self, action: Action) -> None:
        """Carry out one action."""
        name, schedule = action.name, self.schedule
        self.machine.wait(self.waits(action))
        if action.kind is Kind.COMPUTE:
            self._run(action, schedule.computes[name].seconds)
        elif action.kind is Kind.UPDATE_DEVICE:
            self.totals.discard(name)
            self._run(action, schedule.update_device_s[name])
        elif action.kind is Kind.ACCUMULATE:
            self._run(action, schedule.add_device_s[name] if name in self.totals else 0.0)
            self.totals.add(name)
        elif action.kind is Kind.UPDATE_CPU:
            self.update[name] = self._queue(action, Resource.CPU, schedule.update_cpu_s[name], 0, self.gradient(name))
        elif action.kind is Kind.ACCUMULATE_CPU:
            addition = self._queue(action, Resource.CPU, schedule.add_cpu_s[name], 0, self.gradient(name))
            self.adding[name] = self.additions[self.arriving.pop(name)] = addition
        elif action.kind is not Kind.FREE:
            self._copy(action)

    def gradient(self, tensor: str) -> list[Job]:
        """What a tensor's gradient on the host still waits for."""
        return _those(self.copy_out, (f"g:{tensor}",)) + _those(self.adding, (tensor,))

    def _run(self, action: Action, seconds: float) -> None:
        self.jobs.append((action, self.machine.run(seconds)))

    def _copy(self, action: Action) -> None:
        item, rates = action.name, self.schedule.rates
        size = self.schedule.item_bytes[item]
        if action.kind is Kind.OFFLOAD:
            waits = _those(self.copy_in, (item,))
            if item.startswith("g:"):
                waits += self._buffer(item[2:])
            self.copy_out[item] = self._queue(action, Resource.OUT, size / rates.out_bytes_per_s, size, waits)
            return
        seconds = size / rates.in_bytes_per_s
        self.copy_in[item] = self._queue(action, Resource.IN, seconds, size, self.sources(item))

    def sources(self, item: str) -> list[Job]:
        """What an item's copy on the host still waits for."""
        waits = _those(self.copy_out, (item,))
        return waits + _those(self.update, (item[2:],)) if item.startswith("p:") else waits

    def _buffer(self, tensor: str) -> list[Job]:
        """The addition that empties the buffer in which a tensor's gradient is to arrive, if it is not done."""
        self.arriving[tensor] = self.sent
        emptied = self.additions.pop(self.sent - 2, None)
        self.sent += 1
        return [emptied] if emptied is not None and not emptied.done else []

    def _queue(self, action: Action, resource: Resource, seconds: float, size: int, waits: list[Job]) -> Job:
        job = self.machine.submit(resource, seconds, size, waits)
        self.jobs.append((action, job))
        return job


def _those(jobs: dict[str, Job], names: Iterable[str]) -> list[Job]:
    """The jobs under `names` that are not done."""
    return [jobs[name] for name in names if name in jobs and not jobs[name].done]
