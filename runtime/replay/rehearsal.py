"""Rehearsal: the allocations of an iteration without its work, to learn before training what an allocator reserves.

A ledger counts bytes; an allocator also needs them contiguous, and rounds. Replaying these changes by the allocator's
rules takes milliseconds, and reserves what training will reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from ...solver import items
from ...solver.compute_names import BACKWARD, FORWARD, START, USER, parse
from ...solver.effects import effect
from ...solver.items import Item, ItemKind
from ...solver.schedule import Action, ComputeSpec, Direction, Kind, Schedule
from ..memory.changes import Change, Rehearsal
from ..memory.updated import Updated
from .binding import Binding, Port
from .program import BlockProgram

_LEARNT = 3  # iterations that are walked; from the third one on all are alike


def rehearse(
    schedule: Schedule,
    binding: Binding,
    updated: Callable[[str], Updated],
    buffer_bytes: Iterable[int] = (),
    *,
    fresh: bool,
) -> Rehearsal:
    """Walk through a schedule and collect its allocations and frees.

    The first iteration starts with the items with which training starts, without leftovers of an iteration before;
    later ones start with the memory as the one before left it.

    Parameters
    ----------
    updated: gives the optimizer's memory for a parameter. buffer_bytes: bytes of each of the model's buffers.
    fresh: whether optimizer states do not exist before the first update makes them.
    """
    walker = _Walker(schedule, binding, updated)
    walker.unborn = {item for item in schedule.item_bytes if fresh and item.kind is ItemKind.STATE}
    for item in schedule.resident:
        if item.kind not in (*items.WHOLE_GRADIENTS, ItemKind.OLD_OUTPUT):
            walker.bring(item)
    for size in buffer_bytes:
        walker.make(size)
    stretches = [walker.take()]
    for _ in range(_LEARNT):
        for part in schedule.parts:
            walker.walk(part.actions)
            if part.direction is Direction.BACKWARD:
                walker.items = {items.after_pass(item): numbers for item, numbers in walker.items.items()}
        stretches.append(walker.take())
    return Rehearsal(tuple(stretches), sum(change.bytes > 0 for change in stretches[-1]))


class _Walker:
    """The state of a walk: `changes` since the last `take`, `items` (allocations by item), `unborn` (no state yet)."""

    def __init__(self, schedule: Schedule, binding: Binding, updated: Callable[[str], Updated]) -> None:
        self.schedule, self.binding, self.updated = schedule, binding, updated
        self.changes: list[Change] = []
        self.items: dict[Item, list[int]] = {}
        self.unborn: set[Item] = set()
        self._last = 0

    def take(self) -> list[Change]:
        """Return the changes since the last call."""
        taken, self.changes = self.changes, []
        return taken

    def walk(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if action.kind is Kind.COMPUTE:
                self._compute(action.name)
            elif action.kind is Kind.UPDATE_DEVICE:
                self._update(action.name)
            elif action.kind is Kind.BEGIN_TOTAL:
                self.items[items.total(action.name)] = self.items.pop(items.gradient(action.name), [])
            else:
                does = effect(action, self.schedule)
                for item in does.brings:
                    self.bring(item)
                for item in does.releases:
                    self._end(self.items.pop(item, ()))

    def bring(self, item: Item, *, fixed: bool = False) -> None:
        """Allocate an item as a prefetch does.

        Parameters
        ----------
        fixed: whether other code knows its address.
        """
        if item.kind is ItemKind.STATE:
            updated = self.updated(item.name)
            there = updated.state_bytes[: updated.n_known] if item in self.unborn else updated.state_bytes
            sizes = [self.schedule.share_of_state(item, size) for size in there]
        elif item.kind in (ItemKind.KEPT, ItemKind.OFFLOADED):
            block = self.binding.blocks[item.block]
            wanted = block.kept if item.kind is ItemKind.KEPT else block.offloaded
            sizes = [block.made_bytes[storage] for storage in wanted]
        else:
            sizes = [self.schedule.item_bytes[item]]
        self.items[item] = [self.make(size, fixed=fixed) for size in sizes]

    def _update(self, name: str) -> None:
        updated, share = self.updated(name), self.schedule.share_of_state
        parts = self.schedule.states.get(name, ())
        for item in parts:
            passing = share(item, updated.workspace_bytes)
            if item in self.unborn:
                self.unborn.discard(item)
                together = (*(share(item, size) for size in updated.state_bytes[updated.n_known :]), passing)
                made = [self.make(size, together[i + 1 :]) for i, size in enumerate(together[:-1])]
                self.items[item] = [*self.items.get(item, ()), *made]
            self._pass(passing)
        if not parts:
            self._pass(updated.workspace_bytes)

    def _compute(self, name: str) -> None:
        what, block, slot = parse(name)
        if what == START:
            self._start(slot)
        elif what == USER:
            spec = self.schedule.computes[name]
            self._pass(spec.rise_bytes)
            for item in spec.makes:  # the user hands them in
                self.bring(item, fixed=True)
        elif what == FORWARD and block is not None:
            self._forward(block, slot)
        elif what == BACKWARD and block is not None:
            self._backward(block, slot, self.schedule.computes[name])

    def _start(self, slot: int) -> None:
        start, sizes = self.binding.start, self.schedule.item_bytes
        storage = {port.name: port.storage for port in start.inputs}
        given = {}
        for name in filter(None, start.batch):
            item = self.binding.shared_item.get(name)
            own = start.program.given.get(storage.get(name, -1))
            if own is not None:
                given[storage[name]] = self.make(own)
            elif item is not None:
                self.items.setdefault(item.at(slot), []).append(self.make(sizes[item]))
        live = self._run(start.program, given)
        for port in start.results:
            if port.storage in live:
                item = self.binding.shared_item[port.name].at(slot)
                self.items.setdefault(item, []).append(live.pop(port.storage))

    def _forward(self, index: int, slot: int) -> None:
        block = self.binding.blocks[index]
        outputs = {port.storage for port in block.results if port.name in self.binding.outputs}
        live = self._run(block.forward, {}, outputs)
        self._end([live.pop(port.storage) for port in block.writes if port.storage in live])
        for port in block.results:
            if port.storage in live and port.name in self.binding.value_item:
                item = self.binding.value_item[port.name].at(slot)
                self.items.setdefault(item, []).append(live.pop(port.storage))
        for item, storages in ((items.kept(index), block.kept), (items.offloaded(index), block.offloaded)):
            self.items[item.at(slot)] = [live.pop(storage) for storage in storages]
        self._end(live.values())

    def _backward(self, index: int, slot: int, spec: ComputeSpec) -> None:
        block = self.binding.blocks[index]
        given: dict[int, int] = {}
        for item, storages in ((items.kept(index), block.kept), (items.offloaded(index), block.offloaded)):
            given |= dict(zip(storages, self.items.pop(item.at(slot), ())))
        for port in block.tangents:
            for number in self.items.pop(_gradient(port, slot), ()):
                given[port.storage] = number
        live = self._run(block.backward, given)
        for port in block.grads:
            item = _gradient(port, slot)
            if item.kind is ItemKind.PARTIAL and items.gradient(item.name) in spec.makes:
                item = items.gradient(item.name)
            added = item.kind is ItemKind.PARTIAL and items.gradient(item.name) in spec.needs
            if port.storage in live and not added:
                self.items[item] = [live.pop(port.storage)]
        self._end(live.values())

    def _run(self, program: BlockProgram, given: dict[int, int], fixed: Collection[int] = ()) -> dict[int, int]:
        live = dict(given)
        fused = program.fused
        if fused is not None:
            # The pieces in which it takes its memory are not known; room for all of it at once suffices for any pieces.
            self._pass(fused.rise_bytes)
            self._end([live.pop(storage) for storage in fused.ends if storage in live])
            return live | {made.storage: self.make(made.bytes, fixed=made.storage in fixed) for made in fused.makes}
        for step in program.instructions:
            together = step.allocates
            for i, (_, storage, size) in enumerate(step.makes):
                live[storage] = self.make(size, together[i + 1 :], fixed=storage in fixed)
            self._pass(step.workspace_bytes)
            self._end([live.pop(storage) for storage in step.ends if storage in live])
        return live

    def make(self, size: int, then: tuple[int, ...] = (), *, fixed: bool = False) -> int:
        """Allocate `size` bytes, followed at once by `then`; return the allocation's number."""
        self._last += 1
        self.changes.append(Change(self._last, max(size, 1), then, fixed))
        return self._last

    def _pass(self, size: int) -> None:
        """Allocate bytes that are freed at once, if any."""
        if size:
            self._end([self.make(size)])

    def _end(self, numbers: Iterable[int]) -> None:
        self.changes += [Change(number, 0) for number in numbers]


def _gradient(port: Port, slot: int) -> Item:
    kind, name = port.name.split(":", 1)
    if kind != "param":
        return items.value_gradient(name).at(slot)
    return items.partial(name).at(slot) if slot else items.gradient(name)
