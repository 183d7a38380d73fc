"""The collection of a schedule's actions, each with its place in its step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import NamedTuple

from ..compute_names import ComputeName
from ..handed import Hand
from ..items import Item
from ..problem import Problem
from ..resources import HOST
from ..schedule import Action, Kind


class Order(IntEnum):
    """The order of actions within a step."""

    FIRST = 0  # the user's code and the gate run before any copy of their part
    PREFETCH = 1
    OFFLOAD_EARLIER = 2  # items that exist when the step starts go out while it computes
    UPDATE_CPU = 3
    COMPUTE = 4
    UPDATE_DEVICE = 5
    OFFLOAD_MADE = 6
    FREE = 7


_AT_THE_END = (Order.UPDATE_DEVICE, Order.OFFLOAD_MADE, Order.FREE)


class Emitted(NamedTuple):
    """One action with its sort key: step, micro-batch of it, place, urgency (0 first), and the order of emission."""

    step: int
    slot: int
    place: Order
    urgency: int
    order: int
    action: Action


class Emitter:
    """Collects entries; the only mutable object of this file."""

    def __init__(self, problem: Problem, sizes: dict[Item, int]) -> None:
        self.problem = problem
        self.sizes = sizes
        self.slots = range(problem.per_step)
        self.entries: list[Emitted] = []
        self.homes: dict[Item, str] = {}

    def add(self, step: int, place: Order, kind: Kind, name: str, urgency: int = 0, slot: int | None = None) -> None:
        """Add an action of one micro-batch of a step, or of all, beside the first compute or after the last one."""
        if slot is None:
            slot = self.slots[-1] if place in _AT_THE_END else 0
        self.entries.append(Emitted(step, slot, place, urgency, len(self.entries), Action(step, kind, name)))

    def compute(self, step: int, place: Order, name: ComputeName, slot: int, urgency: int = 0) -> None:
        self.add(step, place, Kind.COMPUTE, str(name), urgency, slot)

    def each(self, item: Item, step: int) -> list[tuple[Item, int | None]]:
        """Return an item's items by micro-batch of a step; the item itself if it does not depend on the batch."""
        if not item.kind.by_batch:
            return [(item, None)] if item in self.sizes else []
        slots = range(self.problem.slots_at(step))
        return [(item.at(slot), slot) for slot in slots if item.at(slot) in self.sizes]

    def offload(self, step: int, item: Item, made: int, tier: str = HOST, there: Collection[int] = ()) -> None:
        """Send `item`, made in step `made`, to a tier in `step`, and release it at the step's end.

        Parameters
        ----------
        there: the micro-batches whose copies are on the tier already.
        """
        self.homes |= {one: tier for one, _ in self.each(item, step)} if tier != HOST else {}
        self.copy_out(step, item, made, there)
        self.free(step, item)

    def copy_out(self, step: int, item: Item, made: int, there: Collection[int] = ()) -> None:
        for one, slot in self.each(item, step):
            if slot not in there:
                self.add(step, leaves(step, made), Kind.OFFLOAD, one, slot=slot)

    def prefetch(self, step: int, item: Item, needed: int) -> None:
        """Bring `item` to the device in `step`; items that are needed sooner come first."""
        urgency = (needed - step) % self.problem.n_steps
        for one, slot in self.each(item, step):
            # What its own step reads comes while that step computes for the micro-batch before.
            early = slot - 1 if slot and needed == step else slot
            self.add(step, Order.PREFETCH, Kind.PREFETCH, one, urgency, early)

    def return_in_turn(self, needed: int, item: Item) -> None:
        """Bring `item` back for the step that reads it: each copy while the micro-batch before computes there.

        The first micro-batch's comes in the step before, at its end.
        """
        for one, slot in self.each(item, needed):
            step, beside = (needed, slot - 1) if slot else (needed - 1, self.problem.slots_at(needed) - 1)
            self.add(step, Order.PREFETCH, Kind.PREFETCH, one, needed - step, beside)

    def hand_on(self, start: int, hand: Hand, tiers: Mapping[int, str]) -> None:
        """Send some micro-batches' copies away in the step that makes them, and bring them back in those that follow.

        Parameters
        ----------
        start: the first step of the pass. tiers: by micro-batch, where its copy goes.
        """
        slots, made = self.problem.slots_at(start), start + hand.made
        for slot, tier in tiers.items():
            if slot >= slots:
                continue
            one, freed = hand.item.at(slot), slot
            if not hand.left:
                self.homes |= {one: tier} if tier != HOST else {}
                self.add(made, Order.OFFLOAD_MADE, Kind.OFFLOAD, one, slot=slot)
                freed = min(slot + 1, slots - 1)  # while the copy leaves, the next micro-batch computes
            self.add(made, Order.FREE, Kind.FREE, one, slot=freed)
            for step in hand.returns:
                self.add(start + step, Order.PREFETCH, Kind.PREFETCH, one, slot=slot - 1)
            for step in hand.returns[:-1]:
                self.add(start + step, Order.FREE, Kind.FREE, one, slot=slot)

    def free(self, step: int, item: Item, of: int | None = None) -> None:
        """Release `item` at the end of a step; `of` is a step of the pass whose item it is, if another's."""
        for one, slot in self.each(item, step if of is None else of):
            self.add(step, Order.FREE, Kind.FREE, one, slot=slot)


def leaves(step: int, made: int) -> Order:
    return Order.OFFLOAD_MADE if step == made else Order.OFFLOAD_EARLIER
