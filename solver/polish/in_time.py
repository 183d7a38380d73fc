"""List scheduling of a schedule's moves under the simulator's clock.

The executor takes actions in order, so an action that is early in the order can delay a more urgent one, by blocking
the executor or by occupying a lane. Here the actions that block the executor keep their order; all others are inserted
while the schedule is simulated. Each lane is given the most urgent ready tasks, just enough to keep it busy until the
executor's next turn. Memory is released only when bytes are needed, of items already copied to the host first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ..effects import computing_s, effect, with_actions
from ..resources import Resource
from ..schedule import Action, Kind, Schedule
from ..simulate import DryRun
from .unrolled import Entry, Task, Unrolled

# Pairs: how far a lane is filled, in spans; the iteration that is taken.
_VARIANTS = ((1.0, 2), (0.5, 2), (5.0, 2), (1.0, 3), (0.25, 2), (2.0, 3), (0.0, 2), (5.0, 3))
_WORK = 16000  # effort limit: actions in all variants together
_FORCED = (
    Kind.OFFLOAD,
    Kind.SPECULATE_CPU,
    Kind.UPDATE_CPU,
    Kind.ACCUMULATE_CPU,
    Kind.FREE,
    Kind.PREFETCH,
)  # in this order

Keys = set[tuple[int, int]]


class _Stuck(Exception):
    """Memory cannot be freed with the tasks as they stand, or an iteration does not end as it began."""


def in_time(schedule: Schedule) -> Iterator[Schedule]:
    """Yield the schedule with its moves timed, in a few variants, fewer for a long schedule.

    Tasks that cross the end of one iteration cross it in every iteration. No task crosses the border between
    micro-batches, or one at which the user's own code updates.

    Parameters
    ----------
    schedule: a valid schedule.

    Returns: schedules, of which one may in rare cases exceed the device budget; none if no steady order is found.
    """
    for reach, lap in _VARIANTS[: max(1, _WORK // len(schedule.actions))]:
        found = taken_in_time(schedule, reach, lap)
        if found is not None:
            yield found


def taken_in_time(
    schedule: Schedule, reach: float, lap: int = 2, shifts: Mapping[tuple[int, int], float] | None = None
) -> Schedule | None:
    """Return the schedule with its moves timed.

    Parameters
    ----------
    reach: how far a lane is filled, in units of the seconds of the next blocking action. lap: the iteration that is
        taken.
    shifts: by part of the schedule and index in it, the entries by which a move is more urgent (below 0) or less.

    Returns: the schedule, which in rare cases exceeds the device budget; None if no steady order is found.
    """
    try:
        return _Walk(Unrolled(schedule, lap + 2, shifts or {}), reach, lap).schedule()
    except _Stuck:
        return None


class _Walk:
    """Walks iterations of a schedule and takes every task at its time.

    State: `_here` and `_home`, the current entry and pass; `_level`, bytes on the device, and `_highs`, by entry the
    most bytes known to be there; `_open`, by kind and lane the tasks whose floor has been passed, `_released` the
    releases among them; `_taken`, the actions taken and where; the simulated executor.

    Parameters
    ----------
    row: the iterations. reach: how far lanes are filled. lap: the iteration that counts, which must end as the one
        before.
    """

    def __init__(self, row: Unrolled, reach: float, lap: int) -> None:
        schedule = row.schedule
        self._row, self._schedule, self._reach, self._lap = row, schedule, reach, lap
        self._executor = DryRun(schedule)
        self._machine = self._executor.machine
        self._budget = schedule.device_budget_bytes
        self._level = sum(schedule.item_bytes[item] for item in schedule.resident)
        self._highs = list(row.highs)
        self._taken: list[tuple[Entry, Action, Task | None]] = []
        self._due = _by_entry(row, lambda task: task.place)
        self._opening = _by_entry(row, lambda task: task.floor)
        self._additions = {
            id(one): task for task in row.tasks if task.action.kind is Kind.ACCUMULATE_CPU for one in task.after
        }
        self._open: dict[tuple[Kind, Resource | None], list[Task]] = {task.lane: [] for task in row.tasks}
        self._released = self._open.setdefault((Kind.FREE, None), [])
        self._here = self._home = 0
        self._at = row.entries[0]  # the entry at which tasks taken now are placed
        self._early: Keys | None = None  # keys that may be taken before the next border although they belong behind it
        self._late: Keys = set()  # keys that may not be prefetched before it although they belong there

    def schedule(self) -> Schedule:
        """Return the schedule of the iteration that counts."""
        self._walk()
        walks = self._row.walks
        home = {task.key for _, _, task in self._taken if task is not None and task.home // walks == self._lap}
        parts: list[list[Action]] = [[] for _ in self._schedule.parts]
        for at, action, task in self._taken:
            if at.lap != self._lap or at.walk == self._row.repeated:
                continue
            before = task is not None and task.home // walks < self._lap
            if before and task is not None and task.key in home and task.action.kind is not Kind.PREFETCH:
                continue  # left over from the iteration before; from now on it is done in time
            parts[at.part].append(replace(action, step=at.step))
        return with_actions(self._schedule, parts)

    # -- the order of blocking actions --------------------------------------------------------------------------------

    def _walk(self) -> None:
        entries, crossed = self._row.entries, (set[tuple[int, int]](), set[tuple[int, int]]())
        ends = [entry for entry in entries if entry.action is None]
        for i, entry in enumerate(entries):
            if entry.lap > self._lap:
                return
            closed, counts = ends[self._home].closed, entry.lap == self._lap
            self._early = set() if closed else crossed[0] if counts else None
            self._late = crossed[1] if counts and not closed else set()
            before = entries[max(i - 1, 0)]
            self._here, self._at = i, entry if before.action is None or before.part == entry.part else before
            self._catch_up()
            if entry.action is not None:
                self._pass_by(entry, entry.action)
                continue
            self._end_pass(forced=closed or counts)
            if not closed:
                if counts and self._crossed()[0] != crossed[0]:
                    raise _Stuck
                crossed = self._crossed()
            self._home += 1

    def _crossed(self) -> tuple[Keys, Keys]:
        """Return the tasks taken that belong behind a border, and those not taken that belong before it, by key."""
        tasks = self._row.tasks
        early = {task.key for task in tasks if task.done and task.home > self._home}
        return early, {task.key for task in tasks if not task.done and task.home <= self._home}

    def _catch_up(self) -> None:
        """Take the tasks whose place has come, except releases, which wait until their bytes are needed."""
        for task in self._opening.get(self._here, ()):
            insort(self._open[task.lane], task, key=Task.rank)
        for task in self._due.get(self._here, ()):
            if task.action.kind is not Kind.FREE:
                self._take(task)

    def _pass_by(self, entry: Entry, action: Action) -> None:
        """Carry out an action that blocks the executor; while it waits, lanes are refilled whenever a job ends."""
        seconds, does = computing_s(action, self._schedule), effect(action, self._schedule)
        if does.brings:
            for task in [one for one in self._released if one.action.name in does.brings]:
                if task.place <= self._here:
                    self._take(task)
        rise = does.rise_bytes
        self._fill(seconds, 0)
        self._make_room(rise)
        while self._executor.has_to_wait(does):
            self._machine.advance()
            self._fill(seconds, rise)
        self._at = entry
        self._carry_out(action)
        self._level += does.growth_bytes

    def _end_pass(self, *, forced: bool) -> None:
        """Take all tasks that belong before a border, if the border requires it."""
        self._fill(0.0, 0)
        early = self._early or set()
        for kind in _FORCED if forced else ():
            for task in sorted((one for one in self._row.tasks if one.action.kind is kind), key=Task.rank):
                own = task.home <= self._home and task.key not in self._late
                if own or (task.home == self._home + 1 and task.key in early):
                    self._take(task)

    # -- the tasks ----------------------------------------------------------------------------------------------------

    def _fill(self, seconds: float, rise: int) -> None:
        """Give every lane enough tasks to keep it busy for a span.

        Parameters
        ----------
        rise: additional bytes that the next blocking action needs.
        """
        reach, rates = self._reach * seconds, self._schedule.rates
        lanes = [(Kind.OFFLOAD, path.out) for path in rates.paths.values()]
        worker = rates.worker(Kind.UPDATE_CPU.value)
        for kind, lane in (*lanes, (Kind.SPECULATE_CPU, worker), (Kind.UPDATE_CPU, worker)):
            for task in self._candidates(kind, lane, reach):
                self._take(task)
        for path in rates.paths.values():
            self._bring(path.into, reach, rise)

    def _bring(self, lane: Resource, reach: float, rise: int) -> None:
        """Give a link to the device enough tasks to keep it busy, as far as there is room."""
        for task in self._candidates(Kind.PREFETCH, lane, reach):
            for one in task.after:
                self._take(one)
            if not self._find_room(task, rise):
                break
            self._take(task)

    def _candidates(self, kind: Kind, lane: Resource, reach: float) -> Iterator[Task]:
        """Yield the tasks that a lane may take until it is busy for long enough, those that can begin at once first."""
        for ready in (True, False):
            busy_s = self._machine.ready_s if ready else self._machine.submitted_s
            if busy_s(lane) > reach:
                return
            for task in list(self._open.get((kind, lane), ())):
                if not self._may(task):
                    continue
                sources = self._executor.sources(task.does)
                if bool(sources) is ready or (kind is Kind.PREFETCH and any(job.waits for job in sources)):
                    continue  # a prefetch must be next in line, or its bytes would be occupied while it waits
                yield task
                if busy_s(lane) > reach:
                    return

    def _may(self, task: Task) -> bool:
        """Return whether a task may be taken now without blocking the executor."""
        if task.done:
            return False
        for one in task.after:
            if not one.done and not self._gone(one):
                return False
        if task.home > self._home:
            return self._early is None or task.key in self._early
        return task.home < self._home or task.action.kind is not Kind.PREFETCH or task.key not in self._late

    def _gone(self, task: Task) -> bool:
        """Return whether a task is a release that may be taken now without waiting for a copy."""
        return task.action.kind is Kind.FREE and self._may(task) and not self._executor.has_to_wait(task.does)

    def _find_room(self, task: Task, rise: int) -> bool:
        """Release items that have left until another one fits up to its place; return whether it does."""
        over = self._level + task.size + rise - self._budget
        if over <= 0 and self._fits(task):
            return True
        if over > sum(one.size for one in self._released):
            return False
        gone = [one for one in self._released if self._gone(one)]
        if over > sum(one.size for one in gone):
            return False
        for one in gone:  # later on only releases moved forward make room
            if one.place > self._here and not self._fits(task):
                self._take(one)
        for one in gone:
            if self._level + task.size + rise > self._budget:
                self._take(one)
        return self._fits(task) and self._level + task.size + rise <= self._budget

    def _fits(self, task: Task) -> bool:
        return max(self._highs[self._here : task.place], default=0) <= self._budget - task.size

    def _make_room(self, more: int) -> None:
        """Release until `more` bytes fit; items that have arrived on the host go first."""
        while self._level + more > self._budget:
            held = [one for one in self._released if not one.done and all(t.done for t in one.after)]
            held = [one for one in held if one.place <= self._here or self._gone(one)]
            if not held:
                raise _Stuck
            self._take(min(held, key=lambda one: (self._executor.has_to_wait(one.does), one.rank())))

    def _take(self, task: Task) -> None:
        if task.done:
            return
        for one in task.after:
            self._take(one)
        change = task.does.growth_bytes
        if change > 0:
            self._make_room(change)
        task.done = True
        if task.floor <= self._here:
            self._open[task.lane].remove(task)
        self._carry_out(task.action, task)
        if id(task) in self._additions:
            self._take(self._additions[id(task)])
        self._level += change
        for i in range(self._here, min(task.place, len(self._highs))) if change else ():
            self._highs[i] += change

    def _carry_out(self, action: Action, task: Task | None = None) -> None:
        self._taken.append((self._at, action, task))
        self._executor.take(action)


def _by_entry(row: Unrolled, of: Callable[[Task], int]) -> dict[int, list[Task]]:
    found: dict[int, list[Task]] = {}
    for task in row.tasks:
        found.setdefault(of(task), []).append(task)
    return found
