"""The shapes of a pass's micro-batches: the programs that run for each of them, and the bytes of what these make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...solver.items import Item, ItemKind
from ...solver.schedule import ComputeSpec, Schedule
from ...solver.scheduling.follow import excess_bytes, side_by_side
from .binding import Binding


@dataclass(frozen=True, eq=False)
class Shape:
    """What the actions of a schedule work on for batches of one shape.

    Parameters
    ----------
    schedule: takes the same actions, with the bytes of batches of this shape in all slots. binding: its programs.
    """

    schedule: Schedule
    binding: Binding

    def excess_bytes(self, other: Shape) -> int | None:
        """Return how many bytes more an executor for this shape needs for batches of another one, at any moment.

        Returns: None if they take other actions, or if what they leave for later has more bytes.
        """
        found = excess_bytes(self.schedule, other.schedule)
        if found is None:
            return None
        pairs = zip(self.binding.blocks, other.binding.blocks, strict=True)
        alike = all(own.offloaded.keys() == its.offloaded.keys() for own, its in pairs)
        pairs = zip(self.binding.blocks, other.binding.blocks, strict=True)
        if not alike or any(own.made_bytes[s] < its.made_bytes[s] for own, its in pairs for s in own.offloaded):
            return None
        return found

    def storage_bytes(self, item: Item) -> dict[str, int]:
        """Return the bytes of each storage of a value, of its gradient, or of the values that a block offloads."""
        if item.kind is not ItemKind.OFFLOADED:
            return {"": self.schedule.item_bytes[item]}
        block = self.binding.blocks[item.block]
        return {str(storage): block.made_bytes[storage] for storage in block.offloaded}


class Shapes:
    """The shapes of the micro-batches of the pass that runs, by slot.

    State: `_now`, those of that pass, and its `_schedule`, once it was asked for; `_before`, the bytes of items of the
    pass before that are still on the device.
    Changed by the executor alone.

    Parameters
    ----------
    own: the shape for which the schedule was made, the largest one. Micro-batches have it if nothing else is said.
    """

    def __init__(self, own: Shape) -> None:
        self.own = own
        self._now: tuple[Shape, ...] = ()
        self._schedule: Schedule | None = None
        self._before: dict[Item, int] = {}

    def begin(self, shapes: Sequence[Shape], resident: Callable[[], Iterable[Item]]) -> None:
        """Note the shapes of the pass that begins.

        Parameters
        ----------
        shapes: by slot; empty if all micro-batches have the schedule's own. resident: lists the items with which the
            pass starts.
        """
        now = () if all(one is self.own for one in shapes) else tuple(shapes)
        if now == self._now:
            self._before = {}
            return
        self._before = {item: self.bytes_of(item) for item in resident() if item.kind.by_batch}
        self._now, self._schedule = now, None

    def of(self, slot: int) -> Shape:
        """Return the shape of a slot's micro-batch."""
        return self._now[slot] if slot < len(self._now) else self.own

    def binding(self, slot: int) -> Binding:
        """Return the programs of a slot's micro-batch."""
        return self.of(slot).binding

    @property
    def schedule(self) -> Schedule:
        """The schedule with the bytes and seconds of the micro-batches of the pass that runs, the same at each call."""
        if self._schedule is None:
            schedules = [shape.schedule for shape in self._now] or [self.own.schedule]
            alike = all(one is schedules[0] for one in schedules)
            self._schedule = schedules[0] if alike else side_by_side(self.own.schedule, schedules)
        return self._schedule

    def spec(self, compute: str, slot: int) -> ComputeSpec:
        """Return the specification of a slot's compute."""
        return self.of(slot).schedule.computes[compute]

    def bytes_of(self, item: Item) -> int:
        """Return an item's bytes."""
        shape = self.of(item.slot) if item.kind.by_batch else self.own
        return shape.schedule.item_bytes[item]

    def bytes_there(self, item: Item) -> int:
        """Return the bytes of an item with which the pass starts."""
        return self._before.get(item, self.bytes_of(item))

    def freed_bytes(self, item: Item) -> int:
        """Return the bytes of an item that is released, which the pass before may have made."""
        return self._before.pop(item, self.bytes_of(item))
