"""Local improvement of a schedule: updates and prefetches start earlier, and frees that would block come later."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from .. import items
from ..effects import computing_s, effect, with_actions
from ..items import Item
from ..resources import Resource
from ..schedule import Action, Kind, Schedule
from ..simulate import memory_highs, simulate
from .unrolled import has_barrier

_AHEAD = 2  # a copy should be ready this many computes before it is needed


def improve(schedule: Schedule) -> Schedule:
    """Return a schedule that is at least as fast in the simulator and within the device budget at every action.

    Host updates start as soon as their gradient is on its way. Of the updates that wait for the CPU either the oldest
    goes first, or the one whose parameter is prefetched first. Prefetches move up, in their order and not before the
    host's copy is valid, so that they are done about two computes before they are needed, including the link's time for
    the prefetches behind them. Frees of items on their way out move to just before the first action that needs their
    bytes. All three may cross the end of the iteration, unless the user's own code updates there. None may cross the
    border between two micro-batches, since a middle one must end with the items that it started with.

    Parameters
    ----------
    schedule: a valid schedule.

    Returns: the fastest of a few variants, including the given schedule.
    """
    early = _early_updates(schedule)
    base = fastest(early, _urgent_updates(early))
    late, hoisted = _late_frees(base), _hoisted(base)
    return fastest(schedule, base, late, hoisted, _late_frees(hoisted), _hoisted(late))


def fastest(*variants: Schedule) -> Schedule:
    """Return the fastest of the schedules in the simulator, the first of equally fast ones."""
    best, best_s = variants[0], simulate(variants[0]).step_s
    for variant in variants[1:]:
        seconds = simulate(variant).step_s
        if seconds < best_s * (1 - 1e-9):
            best, best_s = variant, seconds
    return best


@dataclass(frozen=True)
class _Placed:
    """An action, the part of the iteration that it belongs to, and that part's pass; the turn-around is the last's."""

    action: Action
    part: int
    of_pass: int


def _placed(schedule: Schedule) -> list[_Placed]:
    return [
        _Placed(action, number, part.of_pass) for number, part in enumerate(schedule.parts) for action in part.actions
    ]


def _crosses(entry: _Placed, following: _Placed) -> bool:
    """Return whether another pass of the same iteration begins between two neighbours."""
    return entry.of_pass < following.of_pass


def _rebuilt(schedule: Schedule, placed: Iterable[_Placed]) -> Schedule:
    """Return the schedule with these actions, in their order within each part."""
    parts: list[list[Action]] = [[] for _ in schedule.parts]
    for entry in placed:
        parts[entry.part].append(entry.action)
    return with_actions(schedule, parts)


def _beside(moved: _Placed, neighbour: _Placed) -> _Placed:
    """Return `moved` as an action next to `neighbour`, in its step and part."""
    return replace(neighbour, action=replace(moved.action, step=neighbour.action.step))


def _moved(actions: list[_Placed], places: dict[int, int]) -> Iterable[_Placed]:
    """Yield the actions, those at the keys of `places` moved, in their order, to just before the index given there."""
    before: dict[int, list[int]] = {}
    for i, place in places.items():
        before.setdefault(place, []).append(i)
    for i, entry in enumerate(actions):
        ahead = actions[max(i - 1, 0)]
        for j in before.get(i, ()):
            yield actions[j] if i == j else _beside(actions[j], entry if _crosses(ahead, entry) else ahead)
        if i not in places:
            yield entry


def _early_updates(schedule: Schedule) -> Schedule:
    """Start host updates, in their order, right after the copies of their gradients have been queued."""
    actions = _from_backward(schedule)
    places: dict[int, int] = {}
    earliest = 0
    for i, ready in _ready_updates(schedule, actions).items():
        earliest = places[i] = max(earliest, min(i, ready))
    return _rebuilt(schedule, _moved(actions, places))


def _urgent_updates(schedule: Schedule) -> Schedule:
    """Reorder host updates: the CPU always begins the ready one whose parameter is prefetched first.

    The times at which updates are ready come from a simulation of the given schedule.
    """
    simulation, cut = simulate(schedule), len(schedule.parts[0].actions)
    actions = _from_backward(schedule)
    plain = [entry.action for entry in actions]
    ready = _ready_updates(schedule, actions)
    due = {i: _next_prefetch(plain, i) for i in ready}
    clock = [began for began, _ in simulation.taken]
    clock = clock[cut:] + [began + simulation.step_s for began in clock[:cut]]
    places: dict[int, int] = {}
    earliest, now_s, waiting = 0, 0.0, sorted(ready, key=lambda i: (ready[i], due[i]))
    while waiting:
        now_s = max(now_s, clock[ready[waiting[0]] - 1])
        chosen = min((i for i in waiting if clock[ready[i] - 1] <= now_s), key=lambda i: (due[i], i))
        waiting.remove(chosen)
        earliest = places[chosen] = max(earliest, ready[chosen])
        now_s += schedule.update_cpu_s[plain[chosen].name]
    return _rebuilt(schedule, _moved(actions, places))


def _next_prefetch(actions: list[Action], update: int) -> int:
    """Return the index at which the parameter of an update is prefetched."""
    item = items.parameter(actions[update].name)
    later = range(update, len(actions))
    return next((i for i in later if actions[i].name == item and actions[i].kind is Kind.PREFETCH), len(actions))


def _from_backward(schedule: Schedule) -> list[_Placed]:
    """List the actions from the first backward on: a gradient, its update and the next use then come in this order."""
    actions, cut = _placed(schedule), len(schedule.parts[0].actions)
    return actions[cut:] + actions[:cut]


def _ready_updates(schedule: Schedule, actions: list[_Placed]) -> dict[int, int]:
    """Return, by host update, the first index at which it can start: its gradient is on its way and the gate open."""
    sent: dict[str, int] = {}
    opens = next(i for i, entry in enumerate(actions) if entry.action.name == "gate") + 1 if schedule.gate else 0
    ready: dict[int, int] = {}
    for i, entry in enumerate(actions):
        name = entry.action.name
        if entry.action.kind is Kind.OFFLOAD:
            sent[name] = i
        elif entry.action.kind is Kind.ACCUMULATE_CPU:
            sent[items.gradient(name)] = i
        elif entry.action.kind in (Kind.UPDATE_CPU, Kind.SPECULATE_CPU):
            soonest = 0 if entry.action.kind is Kind.SPECULATE_CPU else opens
            whole = items.total(name) if schedule.sums_on_device else items.gradient(name)
            ready[i] = max(soonest, sent.get(whole, i - 1) + 1)
    return ready


def _late_frees(schedule: Schedule) -> Schedule:
    """Hold back frees of items on their way out until an action needs the bytes; the oldest free goes first."""
    if not has_barrier(schedule):
        _, held = _hold_back(schedule, ())
        done, still_held = _hold_back(schedule, held)
        if [late.action for late in held] == [late.action for late in still_held]:
            return _rebuilt(schedule, done)
    done, held = _hold_back(schedule, ())
    return _rebuilt(schedule, [*done, *(_beside(late, done[-1]) for late in held)])


def _hold_back(schedule: Schedule, held_before: Sequence[_Placed]) -> tuple[list[_Placed], list[_Placed]]:
    """Walk one iteration, holding frees back; return its actions and the frees still held when it ends."""
    budget, sizes = schedule.device_budget_bytes, schedule.item_bytes
    done: list[_Placed] = []
    held = deque(held_before)
    names = {late.action.name for late in held}
    extra = sum(sizes[late.action.item] for late in held)
    leaving: set[Item] = set()
    for entry, high in zip(_placed(schedule), memory_highs(schedule)):
        action = entry.action
        again = effect(action, schedule).brings
        border = bool(done) and _crosses(done[-1], entry)
        while held and (border or high + extra > budget or not names.isdisjoint(again)):
            late = held.popleft()
            names.discard(late.action.name)
            extra -= sizes[late.action.item]
            done.append(_beside(late, done[-1] if done else entry))
        if action.kind is Kind.OFFLOAD:
            leaving.add(action.item)
        if action.kind is Kind.FREE and action.item in leaving:
            leaving.discard(action.item)
            held.append(entry)
            names.add(action.name)
            extra += sizes[action.item]
        else:
            done.append(entry)
    return done, list(held)


def _hoisted(schedule: Schedule) -> Schedule:
    return _hoist(_hoist(schedule, rotated=False), rotated=True)


def _hoist(schedule: Schedule, *, rotated: bool) -> Schedule:
    """Move prefetches up so that they are done two computes before they are needed, where they fit.

    The walk starts at the first forward, or, if `rotated`, at the first backward; no prefetch moves to before its
    start. None moves into the pass before.
    """
    if rotated and has_barrier(schedule):
        return schedule
    cut = len(schedule.parts[0].actions) if rotated else 0
    actions, highs = _placed(schedule), memory_highs(schedule)
    actions, highs = actions[cut:] + actions[:cut], highs[cut:] + highs[:cut]
    plain = [entry.action for entry in actions]
    room = [schedule.device_budget_bytes - high for high in highs]
    goals, floors = _goals(schedule, plain), _floors(schedule, plain)
    places: dict[int, int] = {}
    earliest = int(rotated)  # after the user's code, which comes first in the backward part
    for i, action in enumerate(plain):
        if i and _crosses(actions[i - 1], actions[i]):
            earliest = i
        if action.kind is not Kind.PREFETCH:
            continue
        size = effect(action, schedule).moved_bytes
        place, end = i, max(goals[i], floors[i], earliest)
        while place > end and room[place - 1] >= size:
            place -= 1
            room[place] -= size
        earliest = places[i] = place
    return _rebuilt(schedule, _moved(actions, places))


def _floors(schedule: Schedule, actions: list[Action]) -> dict[int, int]:
    """Return, by prefetch, the first index at which its item is off the device and valid on the host."""
    floors: dict[int, int] = {}
    touched: dict[Item, int] = {}
    for i, action in enumerate(actions):
        if action.kind is Kind.PREFETCH:
            floors[i] = touched.get(action.item, -1) + 1
            continue
        does = effect(action, schedule)
        for item in (*does.host_writes, *does.releases):
            touched[item] = i
    return floors


def _goals(schedule: Schedule, actions: list[Action]) -> dict[int, int]:
    """Return, by prefetch, the index at which it should start, by the clock of computes alone."""
    clock = [0.0, *accumulate(computing_s(action, schedule) for action in actions)]
    computes = [i for i, action in enumerate(actions) if action.kind is Kind.COMPUTE]
    needed: dict[Item, int] = {}
    goals: dict[int, int] = {}
    start_s = clock[-1]
    for i in range(len(actions) - 1, -1, -1):
        action, does = actions[i], effect(actions[i], schedule)
        if does.resource == Resource.COMPUTE:
            needed.update(dict.fromkeys(does.reads, i))
        elif action.kind is Kind.PREFETCH:
            due_s = clock[needed.pop(action.item, len(actions))]
            start_s = min(due_s, start_s) - does.seconds
            running = bisect_right(computes, bisect_right(clock, start_s) - 1) - 1
            goals[i] = computes[running - _AHEAD] if running >= _AHEAD else 0
    return goals
