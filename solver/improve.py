"""Local improvement of a schedule: frees that would block come later, prefetches come earlier, where memory allows."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from .schedule import Action, Kind, Schedule
from .simulate import memory_highs, simulate

_AHEAD = (2, 6)  # computes by which a copy may be ready earlier than needed: little memory, or more slack


def improve(schedule: Schedule) -> Schedule:
    """A schedule that is at least as fast in the simulator and stays within the device budget at every action.

    Frees of items on their way out move to just before the first action that needs their bytes; prefetches move up,
    in their order and not before the host's copy is valid, so that they are done about two computes before they are
    needed, the time the link needs for what is behind them included.

    Parameters
    ----------
    schedule: a valid schedule.

    Returns: the fastest of a few variants, the given one among them.
    Source: OffMate, section 4.2, goes without this; it is the design's local improvement after rounding.
    """
    best, best_s = schedule, simulate(schedule).step_s
    variants = [schedule, *(_hoist(schedule, ahead) for ahead in _AHEAD)]
    for variant in [*variants[1:], *(_late_frees(v) for v in variants)]:
        seconds = simulate(variant).step_s
        if seconds < best_s * (1 - 1e-9):
            best, best_s = variant, seconds
    return best


@dataclass(frozen=True)
class _Placed:
    """An action and the part of the iteration (0 forward, 1 backward, 2 turn-around) that it belongs to."""

    action: Action
    part: int


def _placed(schedule: Schedule) -> list[_Placed]:
    parts = (schedule.forward, schedule.backward, schedule.turn_around)
    return [_Placed(action, part) for part, actions in enumerate(parts) for action in actions]


def _rebuilt(schedule: Schedule, placed: Iterable[_Placed]) -> Schedule:
    parts: tuple[list[Action], ...] = ([], [], [])
    for entry in placed:
        parts[entry.part].append(entry.action)
    forward, backward, turn_around = (tuple(part) for part in parts)
    return replace(schedule, forward=forward, backward=backward, turn_around=turn_around)


def _behind(moved: _Placed, neighbour: _Placed) -> _Placed:
    """`moved` as an action right after `neighbour`: in its step and part."""
    return _Placed(replace(moved.action, step=neighbour.action.step), neighbour.part)


def _late_frees(schedule: Schedule) -> Schedule:
    """Hold back frees of items on their way out until an action needs the bytes; the oldest go first."""
    budget, sizes = schedule.device_budget_bytes, schedule.item_bytes
    actions = _placed(schedule)
    highs = memory_highs(schedule)
    done: list[_Placed] = []
    held: deque[_Placed] = deque()
    extra, leaving = 0, set()
    for entry, high in zip(actions, highs):
        action = entry.action
        again = _brings(schedule, action)
        while held and (high + extra > budget or any(late.action.name in again for late in held)):
            late = held.popleft()
            extra -= sizes[late.action.name]
            done.append(_behind(late, done[-1]))
        if action.kind is Kind.OFFLOAD:
            leaving.add(action.name)
        if action.kind is Kind.FREE and action.name in leaving:
            leaving.discard(action.name)
            held.append(entry)
            extra += sizes[action.name]
        else:
            done.append(entry)
    done.extend(_behind(late, done[-1]) for late in held)
    return _rebuilt(schedule, done)


def _brings(schedule: Schedule, action: Action) -> tuple[str, ...]:
    """The items that an action brings onto the device or makes there."""
    if action.kind is Kind.COMPUTE:
        return schedule.computes[action.name].makes
    return (action.name,) if action.kind is Kind.PREFETCH else ()


def _hoist(schedule: Schedule, ahead: int) -> Schedule:
    """Move prefetches up so that they are done `ahead` computes before they are needed, where they fit."""
    actions = _placed(schedule)
    highs = memory_highs(schedule)
    room = [schedule.device_budget_bytes - high for high in highs]
    goals, floors = _goals(schedule, ahead), _floors(schedule)
    before: dict[int, list[_Placed]] = {}
    earliest = 0
    for i, entry in enumerate(actions):
        if entry.action.kind is not Kind.PREFETCH:
            continue
        size = schedule.item_bytes[entry.action.name]
        place, end = i, max(goals[i], floors[i], earliest)
        while place > end and room[place - 1] >= size:
            place -= 1
            room[place] -= size
        earliest = place
        before.setdefault(place, []).append(entry if place == i else _at(actions, place, entry))
    return _rebuilt(schedule, _merged(actions, before))


def _at(actions: list[_Placed], place: int, entry: _Placed) -> _Placed:
    return (
        _behind(entry, actions[place - 1])
        if place
        else _Placed(replace(entry.action, step=actions[0].action.step), actions[0].part)
    )


def _merged(actions: list[_Placed], before: dict[int, list[_Placed]]) -> Iterable[_Placed]:
    for i, entry in enumerate(actions):
        yield from before.get(i, ())
        if entry.action.kind is not Kind.PREFETCH:
            yield entry


def _floors(schedule: Schedule) -> dict[int, int]:
    """By prefetch, the first index at which its item is gone from the device and valid on the host."""
    floors: dict[int, int] = {}
    touched: dict[str, int] = {}
    for i, action in enumerate(schedule.actions):
        if action.kind is Kind.PREFETCH:
            floors[i] = touched.get(action.name, -1) + 1
        elif action.kind is Kind.UPDATE_CPU:
            touched[f"p:{action.name}"] = i
        elif action.kind is not Kind.COMPUTE:
            touched[action.name] = i
    return floors


def _goals(schedule: Schedule, ahead: int) -> dict[int, int]:
    """By prefetch, the index at which it should start, by the clock of computes alone."""
    actions = schedule.actions
    spans = [_seconds(schedule, action) for action in actions]
    clock = [0.0, *accumulate(spans)]
    computes = [i for i, action in enumerate(actions) if action.kind is Kind.COMPUTE]
    needed: dict[str, int] = {}
    goals: dict[int, int] = {}
    start_s = clock[-1]
    for i in range(len(actions) - 1, -1, -1):
        action = actions[i]
        if action.kind is Kind.COMPUTE:
            needed.update(dict.fromkeys(schedule.computes[action.name].needs, i))
        elif action.kind is Kind.UPDATE_DEVICE:
            needed.update({f"{kind}:{action.name}": i for kind in "pgs"})
        elif action.kind is Kind.PREFETCH:
            due_s = clock[needed.pop(action.name, len(actions))]
            start_s = min(due_s, start_s) - schedule.item_bytes[action.name] / schedule.rates.in_bytes_per_s
            running = bisect_right(computes, bisect_right(clock, start_s) - 1) - 1
            goals[i] = computes[running - ahead] if running >= ahead else 0
    return goals


def _seconds(schedule: Schedule, action: Action) -> float:
    if action.kind is Kind.COMPUTE:
        return schedule.computes[action.name].seconds
    return schedule.update_device_s[action.name] if action.kind is Kind.UPDATE_DEVICE else 0.0
