"""Several iterations of a schedule in a row: blocking actions keep their places, all others may move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from .. import items
from ..effects import Effect, effect
from ..items import Item, ItemKind
from ..resources import Resource
from ..schedule import ABOUT_ITEMS, Action, Kind, Schedule

NEVER = 1 << 60
_ON_HOST = (Kind.UPDATE_CPU, Kind.SPECULATE_CPU)


@dataclass(frozen=True)
class Entry:
    """A place in the row.

    Parameters
    ----------
    action: the action that blocks the executor here: a compute, an update or an addition on the device, or the release
        of an item that need not be copied; None where a pass ends.
    lap, walk: the iteration, and the pass in it. part: the part of the schedule, in order. step: the schedule's step.
    closed: whether it is the end of a pass that nothing may cross.
    """

    action: Action | None
    lap: int
    walk: int
    part: int
    step: int
    closed: bool = False


@dataclass(eq=False)
class Task:
    """An action that may be taken at several places. Only `done` changes once the row is made.

    Parameters
    ----------
    does: the action's effect. key: part of the schedule, and index in it.
    home: the pass in which the schedule has it, counted over all iterations.
    size: bytes of the item.
    floor: the first entry before which it may be taken. after: tasks that must have been taken before.
    place: the entry before which it must be taken; a release may wait until its bytes are needed.
    number: its index in the row.
    shift: entries by which it counts as more urgent (below 0) or less urgent than its place says.
    """

    action: Action
    does: Effect
    key: tuple[int, int]
    home: int
    size: int
    floor: int
    place: int
    number: int
    shift: float = 0.0
    after: list[Task] = field(default_factory=list)
    done: bool = False

    @cached_property
    def lane(self) -> tuple[Kind, Resource | None]:
        """The kind of the action, and the resource that carries it out."""
        return self.action.kind, self.does.resource

    def rank(self) -> tuple[float, int]:
        """Return the key that sorts tasks by urgency."""
        return self.place + self.shift, self.number


class Unrolled:
    """Entries and tasks of several iterations.

    The place of a copy to the device is right before the entry that needs it, that of a host update before the copy of
    its values, that of any other task where the schedule has it. State: all of it is set while the row is made.

    Parameters
    ----------
    laps: number of iterations. shifts: by key, for the tasks that have one. `walks`: passes of each iteration,
        `repeated` the one of them that equals the next, -1 if none does. `highs`: the bytes on the device during each
        entry if every task is taken at its place.
    """

    def __init__(self, schedule: Schedule, laps: int, shifts: Mapping[tuple[int, int], float]) -> None:
        self.schedule = schedule
        self._shifts = shifts
        self.entries: list[Entry] = []
        self.tasks: list[Task] = []
        self._barrier = has_barrier(schedule)
        self._written: dict[Item, int] = {}  # by item, the last entry that writes it
        self._used: dict[Item, int] = {}  # by item, the last entry that reads or writes it
        self._latest: dict[tuple[Kind, str], Task] = {}
        self._coming: dict[Item, Task] = {}  # copies to the device that nothing has needed yet
        self._opened = self._home = 0  # the entry behind the last gate; the pass, over all laps
        leaving, walks = _leaving(schedule), list(_walked(schedule))
        self.walks, self.repeated = len(walks), 1 if len(walks) > 3 else -1
        for lap in range(laps):
            for walk, parts in enumerate(walks):
                for part, actions in parts:
                    for i, action in enumerate(actions):
                        if not effect(action, schedule).blocks or (part, i) in leaving:
                            self._add_task(action, (part, i))
                        else:
                            self._add_entry(action, lap, walk, part)
                self._end_pass(lap, walk, parts[-1], closed=self._barrier or walk + 1 < len(walks))
        for task in self._coming.values():
            task.place = NEVER
        self._place_updates()
        self.highs = self._levels()

    def _place_updates(self) -> None:
        updates = [task for task in self.tasks if task.action.kind in _ON_HOST]
        for task in updates:
            task.place = NEVER
        for task in self.tasks:
            for one in task.after if task.action.kind is Kind.PREFETCH else ():
                if one.action.kind in _ON_HOST:
                    one.place = min(one.place, task.place)

    def _add_task(self, action: Action, key: tuple[int, int]) -> None:
        kind, name, here = action.kind, action.name, len(self.entries)
        before: list[tuple[Kind, str]] = []
        if kind is Kind.OFFLOAD:
            floor = self._written.get(action.item, -1) + 1
        elif kind is Kind.FREE:
            floor, before = self._used.get(action.item, -1) + 1, [(Kind.OFFLOAD, name)]
        elif kind is Kind.PREFETCH:
            floor, before = self._used.get(action.item, -1) + 1, [(Kind.FREE, name)]
            if action.item.kind in items.WHOLE_GRADIENTS:
                floor = max(floor, self._opened)
            if action.item.kind is ItemKind.PARAMETER:
                before += [(update, action.item.name) for update in _ON_HOST]
                floor = max(floor, self._opened) if (Kind.SPECULATE_CPU, action.item.name) in self._latest else floor
        else:
            floor = 0 if kind is Kind.SPECULATE_CPU else self._opened
            before = [(Kind.OFFLOAD, items.gradient(name))]
        after = [self._latest[one] for one in before if one in self._latest]
        floor = max([floor, *(one.floor for one in after)])
        size = self.schedule.item_bytes[action.item] if kind in ABOUT_ITEMS else 0
        number, shift = len(self.tasks), self._shifts.get(key, 0.0)
        task = Task(action, effect(action, self.schedule), key, self._home, size, floor, here, number, shift, after)
        self._latest[kind, name] = task
        self.tasks.append(task)
        if kind is Kind.PREFETCH:
            self._coming[action.item] = task

    def _add_entry(self, action: Action, lap: int, walk: int, part: int) -> None:
        here = len(self.entries)
        self.entries.append(Entry(action, lap, walk, part, action.step))
        if action.name == "gate":
            self._opened = here + 1
        used, made = _touched(self.schedule, action)
        for item in used:
            self._used[item] = here
            if item in self._coming:
                self._coming.pop(item).place = here
        for item in made:
            self._used[item] = self._written[item] = here

    def _end_pass(self, lap: int, walk: int, last: tuple[int, tuple[Action, ...]], *, closed: bool) -> None:
        """Add the border behind a pass, in the part of its last entry or, if the user's code updates, in the last."""
        part, step = self.entries[-1].part, self.entries[-1].step
        if self._barrier and last[1]:
            part, step = last[0], last[1][-1].step
        if closed:
            for task in self._coming.values():
                task.place = len(self.entries)
            self._coming.clear()
        self.entries.append(Entry(None, lap, walk, part, step, closed))
        self._home += 1

    def _levels(self) -> list[int]:
        changes = [0] * (len(self.entries) + 1)
        for task in self.tasks:
            if task.place < len(changes):
                changes[task.place] += task.does.growth_bytes
        level = sum(self.schedule.item_bytes[item] for item in self.schedule.resident)
        highs = []
        for entry, change in zip(self.entries, changes):
            level += change
            does = _NOTHING if entry.action is None else effect(entry.action, self.schedule)
            highs.append(level + does.rise_bytes)
            level += does.growth_bytes
        return highs


_NOTHING = Effect(None)


def _touched(schedule: Schedule, action: Action) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Return the items that an entry reads (or releases), and those that it writes."""
    does = effect(action, schedule)
    gradients = [item for item in does.writes if item.kind is ItemKind.GRADIENT]
    # Values are current until the gradient is complete; the copy that its update reads comes in before that.
    return (*does.awaits_arrival, *(items.parameter(item.name) for item in gradients)), does.writes


def _walked(schedule: Schedule) -> Iterator[list[tuple[int, tuple[Action, ...]]]]:
    """Yield the passes of an iteration as lists of indexed parts; the middle passes, if several, as two.

    The turn-around belongs to the last.
    """
    for _, parts in groupby(enumerate(schedule.parts), key=lambda one: one[1].of_pass):
        numbered = list(parts)
        for _ in range(min(2, numbered[0][1].times)):
            yield [(number, part.actions) for number, part in numbered]


def has_barrier(schedule: Schedule) -> bool:
    """Return whether the user's own code updates between iterations, so that nothing may cross their border."""
    updated = schedule.update_cpu_s or schedule.update_device_s
    return not updated and any(item.kind is ItemKind.GRADIENT for item in schedule.item_bytes)


def _leaving(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the releases of items that were sent to the host, by part and index in it."""
    found: set[tuple[int, int]] = set()
    leaving: set[str] = set()
    for _ in range(2):  # the second iteration starts with what the first one left
        for parts in _walked(schedule):
            for part, actions in parts:
                for i, action in enumerate(actions):
                    if action.kind is Kind.OFFLOAD:
                        leaving.add(action.name)
                    elif action.kind is Kind.FREE and action.name in leaving:
                        leaving.discard(action.name)
                        found.add((part, i))
    return found
