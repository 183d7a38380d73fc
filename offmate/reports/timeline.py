"""One iteration as plain data: what every resource does when, where the executor waits, and what memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..solver.compute_names import parse
from ..solver.resources import Resource
from ..solver.schedule import Action, Kind, Schedule
from ..solver.simulate import BusySpan, Simulation
from .items import COMPUTE_WORDS, KINDS, block_of_items, item_of, parts_of
from .levels import Levels

_ROWS = {
    Resource.COMPUTE: "compute",
    Resource.IN: "copies in",
    Resource.OUT: "copies out",
    Resource.CPU: "CPU updates",
}
BAR_WORDS = {
    Kind.PREFETCH: "copy in",
    Kind.OFFLOAD: "copy out",
    Kind.UPDATE_CPU: "update on the CPU",
    Kind.SPECULATE_CPU: "update on the CPU before the gate",
    Kind.UPDATE_DEVICE: "update on the device",
    Kind.BEGIN_TOTAL: "begin the total",
    Kind.ACCUMULATE: "add to the total",
    Kind.ACCUMULATE_CPU: "add to the total on the CPU",
}
MORE = " more"
_COMPUTE_WORDS = {"start": "the batch comes in", "user": "your code", "gate": "the gate"}
THIN = ("update on the device", "begin the total", "add to the total")  # computes beside the blocks' own


@dataclass(frozen=True)
class Bar:
    """A piece of work of one resource, in seconds from the start of the iteration.

    Parameters
    ----------
    name: the item, tensor or compute. word: what is done with it. block: the block that it belongs to, None if none.
    end_s: may lie after the iteration's end, because tails run on into the next one.
    bytes: number of bytes copied, 0 if nothing is copied.
    """

    row: Resource
    name: str
    word: str
    step: int
    block: int | None
    start_s: float
    end_s: float
    bytes: int


@dataclass(frozen=True)
class Wait:
    """A wait of the executor for `cause` before it can continue with `action`."""

    cause: Resource
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Sample:
    """Bytes on the device while the executor carries out an action, per kind, in the order of `KINDS`.

    A compute's workspace is the most that it needs on top of the bytes that were there when it started. Its results are
    part of that, and appear under their own kind when it ends.
    """

    start_s: float
    end_s: float
    action: Action
    bytes: tuple[int, ...]

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.bytes)


@dataclass(frozen=True)
class Timeline:
    """One iteration, predicted or measured, ready to be drawn.

    Parameters
    ----------
    name: label, such as "predicted". n_blocks: number of blocks in the chain.
    phases: name, start and end in seconds of each forward part, each backward part and the turn-around.
    bars, waits: in the order of the actions. memory: in the order of time, without gaps.
    budget_bytes: the limit that the memory curve must not exceed.
    stall_s: seconds in which the executor waits. skipped_s: seconds of micro-batches that are counted but not shown.
    cyclic: whether work that runs past the iteration's end continues at its start, as in a steady prediction.
    """

    name: str
    step_s: float
    n_blocks: int
    phases: tuple[tuple[str, float, float], ...]
    bars: tuple[Bar, ...]
    waits: tuple[Wait, ...]
    memory: tuple[Sample, ...]
    budget_bytes: int
    stall_s: float
    skipped_s: float = 0.0
    cyclic: bool = True

    @cached_property
    def peak(self) -> Sample:
        """The first moment at which the most bytes are on the device."""
        return max(self.memory, key=lambda sample: sample.total_bytes)

    @cached_property
    def rows(self) -> dict[Resource, str]:
        """The title of every resource's row, from top to bottom; further tiers and workers go by their own names."""
        return {**_ROWS, **{bar.row: str(bar.row) for bar in self.bars if bar.row not in _ROWS}}

    def title(self, row: Resource) -> str:
        """Return the name of a resource for people."""
        return self.rows.get(row, str(row))

    def busy_s(self, row: Resource) -> float:
        """Return the seconds in which a resource works, within the part that is shown."""
        return sum(bar.end_s - bar.start_s for bar in self.wrapped() if bar.row == row)

    def busy(self, row: Resource) -> float:
        """Return the fraction of the shown time in which a resource works."""
        shown_s = self.step_s - self.skipped_s
        return self.busy_s(row) / shown_s if shown_s > 0 else 0.0

    def kinds(self) -> tuple[str, ...]:
        """List the kinds of bytes that occur, in the order of `KINDS`."""
        return tuple(kind for i, kind in enumerate(KINDS) if any(sample.bytes[i] for sample in self.memory))

    def wrapped(self) -> Iterator[Bar]:
        """Yield the bars, cut off at the iteration's end and, in a cycle, continued at its start."""
        for bar in self.bars:
            if bar.start_s < self.step_s:
                yield replace(bar, end_s=min(bar.end_s, self.step_s))
            if self.cyclic and bar.end_s > self.step_s > 0:
                yield replace(bar, start_s=max(bar.start_s - self.step_s, 0.0), end_s=bar.end_s - self.step_s)


def build_timeline(
    schedule: Schedule, simulation: Simulation, name: str = "predicted", fixed_bytes: int = 0, budget_bytes: int = 0
) -> Timeline:
    """Build the timeline of the iteration that a dry run predicts.

    Parameters
    ----------
    schedule, simulation: a schedule and its dry run.
    fixed_bytes: bytes on the device whatever the schedule does. budget_bytes: 0 takes the schedule's own budget.

    Returns: a timeline; without fixed bytes its peak is the dry run's, to the byte.
    """
    blocks = block_of_items(schedule)
    phases = _phases(schedule, simulation)
    return Timeline(
        name=name,
        step_s=simulation.step_s,
        n_blocks=len(schedule.options),
        phases=phases,
        bars=tuple(_bar(event, blocks.get(item_of(event.action))) for event in simulation.timeline),
        waits=_waits(schedule, simulation),
        memory=_memory(schedule, simulation, fixed_bytes),
        budget_bytes=budget_bytes or schedule.device_budget_bytes,
        stall_s=sum(simulation.stall_s.values()),
        skipped_s=sum(end_s - start_s for name, start_s, end_s in phases if name.endswith(MORE)),
    )


def _bar(event: BusySpan, block: int | None) -> Bar:
    action = event.action
    return Bar(
        event.resource, action.name, word_of(action), action.step, block, event.start_s, event.end_s, event.bytes
    )  # fmt: skip


def word_of(action: Action) -> str:
    """Return the word for an action's bar."""
    if action.kind is not Kind.COMPUTE:
        return BAR_WORDS[action.kind]
    return (_COMPUTE_WORDS | COMPUTE_WORDS)[parse(action.name).what]


def _phases(schedule: Schedule, simulation: Simulation) -> tuple[tuple[str, float, float], ...]:
    """List the parts in order, and between them the middle micro-batches that are only counted."""
    phases: list[tuple[str, float, float]] = []
    done, at_s = 0, 0.0
    for name, actions in parts_of(schedule):
        if actions:
            start_s = simulation.taken[done][0]
            if start_s > at_s:
                phases.append((f"{schedule.parts[2].times - 1}{MORE}", at_s, start_s))
            at_s = max(start_s, at_s)
        done += len(actions)
        end_s = simulation.taken[done - 1][1] if actions else at_s
        phases.append((name, at_s, end_s))
        at_s = end_s
    return tuple(phases)


def _waits(schedule: Schedule, simulation: Simulation) -> tuple[Wait, ...]:
    """List the dry run's stalls with the actions that they delay; pieces of one wait are joined."""
    waits: list[Wait] = []
    spans = iter(zip(schedule.actions, simulation.taken))
    action, (_, end_s) = next(spans)
    for stall in simulation.stalls:
        if stall.end_s <= stall.start_s:
            continue
        while end_s <= stall.start_s:
            action, (_, end_s) = next(spans)
        last = waits[-1] if waits else None
        if last and last.action is action and last.cause == stall.cause:
            waits[-1] = replace(last, end_s=stall.end_s)
        else:
            waits.append(Wait(stall.cause, action, stall.start_s, stall.end_s))
    return tuple(waits)


def _memory(schedule: Schedule, simulation: Simulation, fixed_bytes: int) -> tuple[Sample, ...]:
    """Make one sample per action, two for a compute that waits first; counted as in `memory_highs`, split by kind."""
    levels = Levels(schedule, fixed_bytes)
    starts = {e.action: e.start_s for e in simulation.timeline if e.action.kind is Kind.COMPUTE}
    samples: list[Sample] = []
    ends_s = [*(start_s for start_s, _ in simulation.taken[1:]), simulation.step_s]
    for action, (start_s, end_s), next_s in zip(schedule.actions, simulation.taken, ends_s):
        levels.begin(action)
        if action.kind is Kind.COMPUTE:
            if starts[action] > start_s:
                samples.append(Sample(start_s, starts[action], action, levels.bytes()))
            rise_bytes = schedule.computes[action.name].rise_bytes
            samples.append(Sample(starts[action], end_s, action, levels.bytes(workspace_bytes=rise_bytes)))
        else:
            samples.append(Sample(start_s, end_s, action, levels.bytes()))
        levels.end(action)
        if next_s > end_s:  # middle micro-batches that are only counted
            samples.append(Sample(end_s, next_s, action, levels.bytes()))
    return tuple(samples)
