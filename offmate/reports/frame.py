"""A schedule's actions as a pandas frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..solver.items import Item
from ..solver.schedule import ABOUT_ITEMS, Schedule
from ..solver.simulate import Simulation
from .extra import viz
from .items import block_of_items, item_of, parts_of

if TYPE_CHECKING:
    import pandas


def schedule_frame(schedule: Schedule, simulation: Simulation, fixed_bytes: int = 0) -> pandas.DataFrame:
    """Tabulate the actions of one iteration in the order in which the executor takes them, one row each.

    Parameters
    ----------
    simulation: the schedule's dry run. fixed_bytes: bytes on the device whatever the schedule does.

    Returns: a frame with the columns step, part (forward, backward, turn-around), action, name (of the item, tensor or
    compute), kind (of its bytes), block, resource, bytes (copied or freed), start_s and end_s (on the resource; for a
    free, the executor's own times), and device_bytes (the most on the device during the action).

    Raises: ImportError if pandas is not installed.
    """
    pandas = viz("pandas")
    blocks = block_of_items(schedule)
    events = {event.action: event for event in simulation.timeline}
    names = [part for part, actions in parts_of(schedule) for _ in actions]
    rows = []
    for part, action, taken, (_, high) in zip(names, schedule.actions, simulation.taken, simulation.memory):
        event, item = events.get(action), item_of(action)
        rows.append({
            "step": action.step,
            "part": part,
            "action": action.kind.value,
            "name": action.name,
            "kind": item.kind.bytes_kind if isinstance(item, Item) else None,
            "block": blocks.get(item),
            "resource": str(event.resource) if event else None,
            "bytes": schedule.item_bytes[action.item] if action.kind in ABOUT_ITEMS else 0,
            "start_s": event.start_s if event else taken[0],
            "end_s": event.end_s if event else taken[1],
            "device_bytes": high + fixed_bytes,
        })  # fmt: skip
    return pandas.DataFrame(rows).astype({"block": "Int64"})
