"""The allocations of an iteration without its work: what an allocator makes of a schedule is seen before training.

A ledger counts bytes; an allocator also needs them in one piece, and rounds. Replayed on the device's own allocator
these changes take milliseconds and touch no memory, and what it has reserved then is what training will reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..solver.schedule import Action, Kind, Schedule, made_old
from .binding import Binding, Port
from .program import Program

_ROUNDING_BYTES = 512
_SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 1 << 21


class Change(NamedTuple):
    """An allocation of `bytes` under a number of its own, or with 0 bytes the end of the allocation of that number."""

    number: int
    bytes: int


def rehearse(
    schedule: Schedule, binding: Binding, state_parts: Callable[[str], Iterable[int]], *, fresh: bool
) -> list[Change]:
    """What is allocated and let go, in order: first what an iteration starts with, then two iterations.

    In the second one lies where the first one has left it what stays on the device between them.

    Parameters
    ----------
    state_parts: bytes of the tensors of a parameter's optimizer state.
    fresh: optimizer states do not exist before the first update makes them.

    Returns: the changes; what an iteration leaves stays allocated at the end.
    """
    walker = _Walker(schedule, binding, state_parts)
    walker.unborn = {item for item in schedule.item_bytes if fresh and item.startswith("s:")}
    for item in schedule.resident:
        if item not in walker.unborn:
            walker.bring(item)
    for _ in range(2):
        for one in schedule.passes:
            walker.walk((*one.forward, *one.backward))
            walker.items = {made_old(item): numbers for item, numbers in walker.items.items()}
        walker.walk(schedule.turn_around)
    return walker.changes


def pool_peaks(changes: Iterable[Change]) -> tuple[int, int]:
    """The most bytes held at once in large allocations, and what the segments for the small ones take at least.

    Caching allocators keep what is small in segments of its own, so that it does not cut up the large ones.
    """
    live: dict[int, int] = {}
    held, peak = [0, 0], [0, 0]
    for change in changes:
        size = -(-change.bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES or -live.pop(change.number)
        if change.bytes:
            live[change.number] = size
        kind = int(abs(size) <= _SMALL_BYTES)
        held[kind] += size
        peak[kind] = max(peak[kind], held[kind])
    return peak[0], -(-peak[1] // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


class _Walker:
    """State: `changes` so far; `items`, the numbers of the allocations of an item; `unborn`, states not yet made."""

    def __init__(self, schedule: Schedule, binding: Binding, state_parts: Callable[[str], Iterable[int]]) -> None:
        self.schedule, self.binding, self.state_parts = schedule, binding, state_parts
        self.changes: list[Change] = []
        self.items: dict[str, list[int]] = {}
        self.unborn: set[str] = set()
        self._last = 0

    def walk(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if action.kind is Kind.COMPUTE:
                self._compute(action.name)
            elif action.kind is Kind.PREFETCH:
                if action.name not in self.unborn:
                    self.bring(action.name)
            elif action.kind is Kind.UPDATE_DEVICE and f"s:{action.name}" in self.unborn:
                self.unborn.discard(f"s:{action.name}")
                self.bring(f"s:{action.name}")
            elif action.kind is Kind.FREE:
                self._end(self.items.pop(action.name, ()))
            elif action.kind is Kind.ACCUMULATE:
                gradient = self.items.pop(f"g:{action.name}", [])
                if f"t:{action.name}" in self.items:
                    self._end(gradient)
                else:
                    self.items[f"t:{action.name}"] = gradient

    def bring(self, item: str) -> None:
        """Allocate an item as a prefetch does."""
        kind, name = item.split(":", 1)
        if kind == "s":
            sizes = list(self.state_parts(name))
        elif kind in "ka":
            block = self.binding.blocks[int(name)]
            wanted = block.kept if kind == "k" else block.offloaded
            made = {s: size for step in block.forward.instructions for _, s, size in step.makes}
            sizes = [made[storage] for storage in wanted]
        else:
            sizes = [self.schedule.item_bytes[item]]
        self.items[item] = [self._make(size) for size in sizes]

    def _compute(self, name: str) -> None:
        if name == "start":
            self._start()
        elif name == "user":
            spec = self.schedule.computes[name]
            self._end([self._make(spec.rise_bytes)])
            for item in spec.makes:
                self.bring(item)
        elif name[0] == "F":
            self._forward(int(name[1:]))
        elif name[0] == "B":
            self._backward(int(name[1:]))

    def _start(self) -> None:
        start, sizes = self.binding.start, self.schedule.item_bytes
        storage = {port.name: port.storage for port in start.inputs}
        given = {}
        for name in filter(None, start.batch):
            item = self.binding.shared_item.get(name)
            own = start.program.given.get(storage.get(name, -1))
            if own is not None:
                given[storage[name]] = self._make(own)
            elif item is not None:
                self.items.setdefault(item, []).append(self._make(sizes[item]))
        live = self._run(start.program, given)
        for port in start.results:
            if port.storage in live:
                self.items.setdefault(self.binding.shared_item[port.name], []).append(live.pop(port.storage))

    def _forward(self, index: int) -> None:
        block = self.binding.blocks[index]
        live = self._run(block.forward, {})
        self._end([live.pop(port.storage) for port in block.writes if port.storage in live])
        for port in block.results:
            if port.storage in live and port.name in self.binding.value_item:
                self.items.setdefault(self.binding.value_item[port.name], []).append(live.pop(port.storage))
        for kind, storages in (("k", block.kept), ("a", block.offloaded)):
            self.items[f"{kind}:{index}"] = [live.pop(storage) for storage in storages]
        self._end(live.values())

    def _backward(self, index: int) -> None:
        block = self.binding.blocks[index]
        given: dict[int, int] = {}
        for kind, storages in (("k", block.kept), ("a", block.offloaded)):
            given |= dict(zip(storages, self.items.pop(f"{kind}:{index}", ())))
        for port in block.tangents:
            for number in self.items.pop(_gradient(port), ()):
                given[port.storage] = number
        live = self._run(block.backward, given)
        for port in block.grads:
            if port.storage in live:
                self.items[_gradient(port)] = [live.pop(port.storage)]
        self._end(live.values())

    def _run(self, program: Program, given: dict[int, int]) -> dict[int, int]:
        live = dict(given)
        fused = program.fused
        if fused is not None:
            # In which pieces it takes its memory is not known; what has room for all of it at once has room for them.
            self._end([self._make(fused.rise_bytes)])
            self._end([live.pop(storage) for storage in fused.ends if storage in live])
            return live | {made.storage: self._make(made.bytes) for made in fused.makes}
        for step in program.instructions:
            for _, storage, size in step.makes:
                live[storage] = self._make(size)
            if step.workspace_bytes:
                self._end([self._make(step.workspace_bytes)])
            self._end([live.pop(storage) for storage in step.ends if storage in live])
        return live

    def _make(self, size: int) -> int:
        self._last += 1
        self.changes.append(Change(self._last, max(size, 1)))
        return self._last

    def _end(self, numbers: Iterable[int]) -> None:
        self.changes += [Change(number, 0) for number in numbers]


def _gradient(port: Port) -> str:
    kind, name = port.name.split(":", 1)
    return f"{'g' if kind == 'param' else 'd'}:{name}"
