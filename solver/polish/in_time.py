"""A schedule's moves taken when their time has come, by the simulator's clock.

The executor takes actions in order, so an action that is early in the order can hold up, or displace on its lane, what
is wanted sooner. Here the order of what blocks the executor stays; everything else is put into it while the schedule is
simulated: each lane is given the most urgent of what is ready, no more than keeps it busy until the executor comes by
again; memory is released when bytes are needed, what has arrived on the host first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ..effects import computing_s, effect, with_actions
from ..machine import Job
from ..resources import Resource
from ..schedule import Action, Kind, Schedule
from ..simulate import DryRun
from .unrolled import Entry, Task, Unrolled

# How far a lane is filled, in spans; the iteration that is taken.
_VARIANTS = ((1.0, 2), (0.5, 2), (5.0, 2), (1.0, 3), (0.25, 2), (2.0, 3), (0.0, 2), (5.0, 3))
_WORK = 16000  # actions in all variants that are tried
_FORCED = (Kind.OFFLOAD, Kind.UPDATE_CPU, Kind.ACCUMULATE_CPU, Kind.FREE, Kind.PREFETCH)  # in this order

Keys = set[tuple[int, int]]


class _Stuck(Exception):
    """Memory cannot be made as the tasks stand, or an iteration does not end as it began."""


def in_time(schedule: Schedule) -> Iterator[Schedule]:
    """The schedule with its moves in time, in a few variants, fewer of a long schedule.

    What crosses the end of an iteration does so in every one alike; nothing crosses the border between micro-batches,
    or that at which the user's own code updates.

    Parameters
    ----------
    schedule: a valid schedule.

    Returns: schedules within the device budget; none where no steady order is found.
    """
    for reach, lap in _VARIANTS[: max(1, _WORK // len(schedule.actions))]:
        found = taken_in_time(schedule, reach, lap)
        if found is not None:
            yield found


def taken_in_time(
    schedule: Schedule, reach: float, lap: int = 2, shifts: Mapping[tuple[int, int], float] | None = None
) -> Schedule | None:
    """The schedule with its moves in time.

    Parameters
    ----------
    reach: how far a lane is filled, in seconds of what blocks the executor next. lap: the iteration that is taken.
    shifts: by part of the schedule and index in it, the entries by which a move is more urgent (below 0), or less.

    Returns: the schedule, which may be above the device budget in a rare case; None where no steady order is found.
    """
    try:
        return _Walk(Unrolled(schedule, lap + 2, shifts or {}), reach, lap).schedule()
    except _Stuck:
        return None


class _Walk:
    """Walks iterations of a schedule and takes every task at its time.

    State: `_here` and `_home`, the entry and the pass; `_level`, bytes on the device, and `_highs`, by entry the most
    that is known to be there; `_open`, by kind the tasks whose floor has been passed; `_taken`, what was taken where;
    the simulated executor.

    Parameters
    ----------
    row: the iterations. reach: how far lanes are filled. lap: the iteration that counts, which ends as the one before.
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
        self._open: dict[Kind, list[Task]] = {kind: [] for kind in Kind}
        self._here = self._home = 0
        self._at = row.entries[0]  # where what is taken now is put
        self._early: Keys | None = None  # what may be taken before the next border, though it belongs behind it
        self._late: Keys = set()  # what may not come in before it, though it belongs before

    def schedule(self) -> Schedule:
        """The schedule of the iteration that counts."""
        self._walk()
        walks = self._row.walks
        home = {task.key for _, _, task in self._taken if task is not None and task.home // walks == self._lap}
        parts: list[list[Action]] = [[] for _ in self._schedule.parts]
        for at, action, task in self._taken:
            if at.lap != self._lap or at.walk == self._row.repeated:
                continue
            before = task is not None and task.home // walks < self._lap
            if before and task is not None and task.key in home and task.action.kind is not Kind.PREFETCH:
                continue  # it was still to come in the iteration before; from now on it is done in time
            parts[at.part].append(replace(action, step=at.step))
        return with_actions(self._schedule, parts)

    # -- the order of what blocks -------------------------------------------------------------------------------------

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
        """What has been taken of what belongs behind a border, and what has not of what belongs before it."""
        tasks = self._row.tasks
        early = {task.key for task in tasks if task.done and task.home > self._home}
        return early, {task.key for task in tasks if not task.done and task.home <= self._home}

    def _catch_up(self) -> None:
        """Take what has come to its place, but for releases, which wait until their bytes are needed."""
        for task in self._opening.get(self._here, ()):
            insort(self._open[task.action.kind], task, key=Task.rank)
        for task in self._due.get(self._here, ()):
            if task.action.kind is not Kind.FREE:
                self._take(task)

    def _pass_by(self, entry: Entry, action: Action) -> None:
        """Carry out what blocks the executor; while it waits lanes are filled again whenever a job ends."""
        seconds, does = computing_s(action, self._schedule), effect(action, self._schedule)
        if does.brings:
            for task in [one for one in self._open[Kind.FREE] if one.action.name in does.brings]:
                if task.place <= self._here:
                    self._take(task)
        rise = does.rise_bytes
        self._fill(seconds, 0)
        self._make_room(rise)
        while any(not job.done for job in self._executor.waits(action)):
            self._machine.advance()
            self._fill(seconds, rise)
        self._at = entry
        self._carry_out(action)
        self._level += does.growth_bytes

    def _end_pass(self, *, forced: bool) -> None:
        """Where the border asks for it, take what is still to be taken before it."""
        self._fill(0.0, 0)
        early = self._early or set()
        for kind in _FORCED if forced else ():
            for task in sorted((one for one in self._row.tasks if one.action.kind is kind), key=Task.rank):
                own = task.home <= self._home and task.key not in self._late
                if own or (task.home == self._home + 1 and task.key in early):
                    self._take(task)

    # -- what moves ---------------------------------------------------------------------------------------------------

    def _fill(self, seconds: float, rise: int) -> None:
        """Give every lane what keeps it busy for a span.

        Parameters
        ----------
        rise: bytes that what comes next needs on top.
        """
        reach, rates = self._reach * seconds, self._schedule.rates
        lanes = [(Kind.OFFLOAD, path.out) for path in rates.paths.values()]
        for kind, lane in (*lanes, (Kind.UPDATE_CPU, rates.worker(Kind.UPDATE_CPU.value))):
            for task in self._candidates(kind, lane, reach):
                self._take(task)
        for path in rates.paths.values():
            self._bring(path.into, reach, rise)

    def _bring(self, lane: Resource, reach: float, rise: int) -> None:
        """Give a link to the device what keeps it busy, as far as there is room."""
        for task in self._candidates(Kind.PREFETCH, lane, reach):
            for one in task.after:
                self._take(one)
            if not self._find_room(task, rise):
                break
            self._take(task)

    def _candidates(self, kind: Kind, lane: Resource, reach: float) -> Iterator[Task]:
        """The tasks of a lane that may be taken until it is busy for long enough, those first that it can begin."""
        for ready in (True, False):
            busy_s = self._machine.ready_s if ready else self._machine.submitted_s
            if busy_s(lane) > reach:
                return
            for task in list(self._open[kind]):
                if not self._may(task) or effect(task.action, self._schedule).resource != lane:
                    continue
                sources = self._sources(task)
                if bool(sources) is ready or (kind is Kind.PREFETCH and any(job.waits for job in sources)):
                    continue  # what would come in must at least be next in line itself, or its bytes would lie there
                yield task
                if busy_s(lane) > reach:
                    return

    def _sources(self, task: Task) -> list[Job]:
        """What a task's job would wait for."""
        return self._executor.sources(effect(task.action, self._schedule))

    def _may(self, task: Task) -> bool:
        """Whether a task may be taken here without blocking the executor."""
        if task.done or not all(one.done or self._gone(one) for one in task.after):
            return False
        if task.home > self._home:
            return self._early is None or task.key in self._early
        return task.home < self._home or task.action.kind is not Kind.PREFETCH or task.key not in self._late

    def _gone(self, task: Task) -> bool:
        """Whether a release need not wait for a copy."""
        return task.action.kind is Kind.FREE and self._may(task) and not self._executor.waits(task.action)

    def _find_room(self, task: Task, rise: int) -> bool:
        """Release what has left until there is room for an item, here and up to where it is needed."""
        gone = [one for one in self._open[Kind.FREE] if self._gone(one)]
        if self._level + task.size + rise - sum(one.size for one in gone) > self._budget:
            return False
        for one in gone:  # further on only what is released early makes room
            if not self._fits(task) and one.place > self._here:
                self._take(one)
        for one in gone:
            if self._level + task.size + rise > self._budget:
                self._take(one)
        return self._fits(task) and self._level + task.size + rise <= self._budget

    def _fits(self, task: Task) -> bool:
        room = self._budget - task.size
        return all(high <= room for high in self._highs[self._here : task.place])

    def _make_room(self, more: int) -> None:
        """Release until `more` bytes fit; what has arrived on the host goes first."""
        while self._level + more > self._budget:
            held = [one for one in self._open[Kind.FREE] if not one.done and all(t.done for t in one.after)]
            held = [one for one in held if one.place <= self._here or self._gone(one)]
            if not held:
                raise _Stuck
            self._take(min(held, key=lambda one: (bool(self._executor.waits(one.action)), one.rank())))

    def _take(self, task: Task) -> None:
        if task.done:
            return
        for one in task.after:
            self._take(one)
        kind = task.action.kind
        change = effect(task.action, self._schedule).growth_bytes
        if change > 0:
            self._make_room(change)
        task.done = True
        if task.floor <= self._here:
            self._open[kind].remove(task)
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
