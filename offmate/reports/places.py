"""The places of every tensor at each step, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from ..solver.effects import effect
from ..solver.items import Item, after_pass
from ..solver.schedule import Direction, Schedule


class Place(IntEnum):
    """The place of an item during a step, ordered from the host to the device."""

    HOST = 0  # or nowhere: not made yet, or no longer needed
    LEAVING = 1  # on the device, but released by the step's end
    ARRIVING = 2  # brought in or made during the step
    DEVICE = 3


@dataclass(frozen=True)
class Track:
    """The places of one item through the steps of an iteration.

    Parameters
    ----------
    places: one per step, in the order of `step_order`.
    """

    item: str
    kind: str
    bytes: int
    places: tuple[Place, ...]


def step_order(schedule: Schedule) -> tuple[int, ...]:
    """List the steps of an iteration in the order in which the executor meets them."""
    return tuple(dict.fromkeys(action.step for action in schedule.actions))


def tracks(schedule: Schedule) -> tuple[Track, ...]:
    """List all items with their places, in the order of the schedule's sizes."""
    columns = {step: column for column, step in enumerate(step_order(schedule))}
    places = {item: [Place.HOST] * len(columns) for item in schedule.item_bytes}
    since = dict.fromkeys(schedule.resident, -1)  # the column in which an item came; -1: before the iteration
    starts = {id(part.actions[0]) for part in schedule.parts if part.of_pass and part.direction is Direction.FORWARD}
    for action in schedule.actions:
        column = columns[action.step]
        if id(action) in starts:
            _age_outputs(places, since, column)
        does = effect(action, schedule)
        for item in does.brings:
            since[item] = column
        for item in does.releases:
            _stay(places[item], since.pop(item), column, Place.LEAVING)
    for item, column in since.items():
        _stay(places[item], column, len(columns) - 1, Place.DEVICE)
    return tuple(
        Track(item, item.kind.bytes_kind, schedule.item_bytes[item], tuple(where)) for item, where in places.items()
    )


def _age_outputs(places: dict[Item, list[Place]], since: dict[Item, int], column: int) -> None:
    """Turn the outputs of the previous pass into old ones when a new pass starts."""
    for item in [item for item in since if after_pass(item) != item]:
        _stay(places[item], since.pop(item), column - 1, Place.DEVICE)
        since[after_pass(item)] = column


def _stay(places: list[Place], first: int, last: int, at_end: Place) -> None:
    for column in range(max(first, 0), last + 1):
        places[column] = Place.DEVICE
    if first >= 0:
        places[first] = Place.ARRIVING
    if at_end is not Place.DEVICE:
        places[last] = at_end
