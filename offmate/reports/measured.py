"""Timelines of recorded iterations, to be drawn beside the predicted ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise

from ..runtime.trace import Recording, Taken
from ..solver.effects import effect
from ..solver.items import Item
from ..solver.resources import Resource
from ..solver.schedule import Action, Kind
from ..solver.simulate import BusySpan
from .items import block_of_items, item_of
from .levels import Levels
from .timeline import Bar, Sample, Timeline, Wait, word_of


def measured_timeline(recording: Recording, budget_bytes: int, name: str = "measured") -> Timeline:
    """Build the timeline of a recorded iteration.

    The executor's waits follow from the jobs: it waits for the copies of items that an action reads, overwrites or
    releases. Memory is the ledger's, split by kind according to the schedule's items; bytes that no item accounts for
    are workspace.

    Parameters
    ----------
    budget_bytes: the limit that the memory curve must not exceed.
    """
    blocks = block_of_items(recording.schedule)
    waiting = _Waiting(recording)
    taken = [(one, waiting.until_s(one)) for walk in recording.walks for one in walk]
    bars = [
        _bar(one.action, Resource.COMPUTE, ready_s, one.end_s, 0, blocks)
        for one, ready_s in taken
        if effect(one.action, recording.schedule).resource == Resource.COMPUTE
    ]
    for job in _joined((*recording.tails, *recording.jobs)):
        # A copy may be done before the computing stream, behind with earlier work, comes to the iteration.
        start_s, end_s = max(job.start_s, 0.0), max(job.end_s, 0.0)
        bars.append(_bar(job.action, job.resource, start_s, end_s, job.bytes, blocks))
    for before, after in pairwise(filter(None, recording.walks)):
        user = Action(after[0].action.step, Kind.COMPUTE, "user")
        bars.append(_bar(user, Resource.COMPUTE, before[-1].end_s, after[0].start_s, 0, blocks))
    waits = tuple(wait for one, ready_s in taken for wait in waiting.causes(one, ready_s))
    return Timeline(
        name=name,
        step_s=recording.step_s,
        n_blocks=len(recording.schedule.options),
        phases=_phases(recording),
        bars=tuple(sorted(bars, key=lambda bar: bar.start_s)),
        waits=waits,
        memory=tuple(_memory(recording, taken)),
        budget_bytes=budget_bytes,
        stall_s=sum(wait.end_s - wait.start_s for wait in waits),
        cyclic=False,
    )


def _bar(action: Action, row: Resource, start_s: float, end_s: float, size: int, blocks: dict[str, int]) -> Bar:
    return Bar(row, action.name, word_of(action), action.step, blocks.get(item_of(action)), start_s, end_s, size)


def _joined(jobs: Iterable[BusySpan]) -> Iterator[BusySpan]:
    """Join the jobs of an action: an item of several tensors, such as a state, is copied tensor by tensor.

    Jobs of one resource need not run in the given order: one that waits lets others pass, even between its parts.
    """
    in_order = sorted(jobs, key=lambda job: (job.resource, job.start_s))
    for _, group in groupby(in_order, key=lambda job: (job.resource, id(job.action))):
        parts = list(group)
        size = sum(part.bytes for part in parts)
        yield replace(parts[0], end_s=parts[-1].end_s, bytes=size)


def _phases(recording: Recording) -> tuple[tuple[str, float, float], ...]:
    passes = recording.walks[:-1]
    numbers = [f" {n + 1}" if len(passes) > 2 else "" for n in range(len(passes) // 2)]
    names = [f"{part}{number}" for number in numbers for part in ("forward", "backward")]
    starts = [walk[0].start_s for walk in passes] + [passes[-1][-1].end_s]
    ends = [*starts[1:], recording.step_s]
    return tuple(zip([*names, "turn-around"], starts, ends))


class _Waiting:
    """The jobs that the executor waited for: those for an action's items that ended while it was being taken."""

    def __init__(self, recording: Recording) -> None:
        self._schedule = recording.schedule
        self._jobs: dict[str, list[BusySpan]] = defaultdict(list)
        self._arriving: dict[Item, list[BusySpan]] = defaultdict(list)
        self._leaving: dict[Item, list[BusySpan]] = defaultdict(list)
        self._on_host: dict[Item, list[BusySpan]] = defaultdict(list)
        for job in (*recording.tails, *recording.jobs):
            self._jobs[item_of(job.action)].append(job)
            does = effect(job.action, self._schedule)
            for jobs, concerned in (
                (self._arriving, does.brings),
                (self._leaving, does.reads),
                (self._on_host, does.host_writes),
            ):
                for item in concerned:
                    jobs[item].append(job)

    def until_s(self, one: Taken) -> float:
        """Return when an action could begin, at the earliest when it was taken."""
        return max((job.end_s for job in self._awaited(one)), default=one.start_s)

    def causes(self, one: Taken, ready_s: float) -> Iterator[Wait]:
        """Yield the wait before an action, in two parts if the awaited job itself waited for another resource."""
        if ready_s <= one.start_s:
            return
        last = max(self._awaited(one), key=lambda job: job.end_s)
        before = self._before(last, one.start_s)
        if before is None:
            yield Wait(last.resource, one.action, one.start_s, ready_s)
            return
        yield Wait(before.resource, one.action, one.start_s, before.end_s)
        yield Wait(last.resource, one.action, before.end_s, ready_s)

    def _awaited(self, one: Taken) -> list[BusySpan]:
        does = effect(one.action, self._schedule)
        if not does.blocks:
            return []
        waits = (
            (self._arriving, does.awaits_arrival),
            (self._leaving, does.awaits_departure),
            (self._on_host, does.host_reads),
        )
        found = (job for jobs, concerned in waits for item in concerned for job in jobs.get(item, ()))
        return [job for job in found if one.start_s < job.end_s <= one.end_s]

    def _before(self, job: BusySpan, since_s: float) -> BusySpan | None:
        """Return the job that another resource had to do first, if it ended only after the waiting began."""
        earlier = [
            j
            for j in self._jobs[item_of(job.action)]
            if j.resource != job.resource and since_s < j.end_s <= job.start_s
        ]
        return max(earlier, key=lambda j: j.end_s, default=None)


def _memory(recording: Recording, taken: list[tuple[Taken, float]]) -> Iterator[Sample]:
    """Yield one sample per action, two for a compute that waits first, and one for the user's code between walks."""
    levels = Levels(recording.schedule, recording.fixed_bytes)
    ends_s = [one.start_s for one, _ in taken[1:]] + [recording.step_s]
    last = {id(walk[-1]) for walk in recording.walks if walk}
    for (one, ready_s), end_s in zip(taken, ends_s):
        levels.begin(one.action)
        computes = one.action.kind is Kind.COMPUTE
        if computes and ready_s > one.start_s:
            yield Sample(one.start_s, ready_s, one.action, levels.bytes_of(one.start_bytes))
        begin_s = ready_s if computes else one.start_s
        done_s = one.end_s if id(one) in last else end_s
        yield Sample(begin_s, done_s, one.action, levels.bytes_of(one.high_bytes))
        levels.end(one.action)
        if done_s < end_s:
            yield Sample(done_s, end_s, one.action, levels.bytes_of(one.end_bytes))
