"""The schedule that the runtime replays: whole tensors and actions, small, frozen, printed as they parse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import groupby
from operator import or_
from typing import Any

from .actions import ABOUT_ITEMS as ABOUT_ITEMS
from .actions import Action as Action
from .actions import ComputeSpec as ComputeSpec
from .actions import Kind as Kind
from .actions import Part as Part
from .actions import Pass as Pass
from .items import Item, ItemKind
from .items import names_of as items_named
from .packing import Tenant, packed, span_of
from .problem import RING_PIECES
from .resources import HOST, Path, Rates, Tier
from .steps import Direction as Direction
from .steps import InPasses, passes_of

_SPARE_STEPS = (2, 1, 0)  # after a place in host memory is free, until it is used again; as many as the budget allows


@dataclass(frozen=True)
class HostLayout:
    """What a schedule needs of the host's memory.

    Parameters
    ----------
    used_bytes: all of it. places: by item that shares memory, its first byte there, and the one after its last.
    shared_bytes: of that memory.
    """

    used_bytes: int
    places: dict[Item, tuple[int, int]] = field(default_factory=dict)
    shared_bytes: int = 0

    @cached_property
    def neighbours(self) -> dict[Item, tuple[Item, ...]]:
        """By item that shares memory, the other items with which its place overlaps, at other times."""
        places = self.places.items()
        return {
            one: tuple(other for other, (start, end) in places if other != one and start < until and since < end)
            for one, (since, until) in places
        }


@dataclass(frozen=True)
class Schedule(InPasses):
    """One iteration as actions over whole tensors, in the order in which the executor takes them.

    The forward part runs inside the model's call, the backward part inside the user's backward, the turn-around part in
    the optimizer's step. After it the iteration starts again, with the items of `resident` on the device.

    With several passes these are the last one's parts, and `lead` holds the passes before it: none for one
    pass, one for two, two for three or more. The second of two is replayed for every pass between the
    first and the last, and ends with the same items on the device as it starts with. Step numbers continue through the
    passes; computes have the same names, and are the same, in each.

    Parameters
    ----------
    options: the option index chosen for each block.
    item_bytes: bytes of every item.
    resident: items on the device when an iteration starts, ascending by name.
    computes: specification of every compute action by name.
    update_cpu_s, update_device_s: seconds per tensor for the tensors updated there.
    homes: by item, the tier that it leaves to, if that is not the host. A frozen parameter with such a home comes from
        there, and never leaves to it. A trained one is updated by the device, or cast from its float32 copy in RAM. If
        it is always on the device, it is written there when somebody reads it. The
        state of a tensor that the host updates has one if it lies in files: its pieces are read for the update, one
        after another, and written back.
    log_cpu_s: seconds per tensor that an update on the host takes longer if it keeps a log of the old values; empty if
        no update may start before the gate.
    add_cpu_s, add_device_s: seconds per tensor to add a gradient to its total, for the tensors updated there; empty for
        one pass. The device adds all of them if passes have several micro-batches.
    host_bytes: bytes in host memory if everything there has memory of its own; see `host_layout`.
    gate: no update starts in the backward part. Gradients stay on the device or go out as they are made. The
        turn-around part, which the executor takes in the optimizer's step, starts the updates: every `update-device`,
        and each `update-cpu` that does not start in the next iteration's first forward part. Between the last backward
        and the first update lies the compute "gate", in which an executor that clips takes the norm. Every gradient (or
        total) is then on the device, on the host, or on its way there, and "gate" waits for those on their way.
        Updates by `speculate-cpu` are the exception: they start in the last backward part or before the "gate", which
        keeps them or undoes them. New parameters leave the host behind the gate only.
    per_step: the micro-batches for which every step runs its block in turn, in slots 0, 1, ...; in a single pass the
        first one's gradients become the sums of all.
    last_per_step: those of the last pass, if they are fewer; 0 if they are as many.
    micro_batches: M, passes per update; more than one needs a gate. Every pass then ends a gradient
        that the device will use with `begin-total`, or with `accumulate` in later passes, and one that the host will
        use with `offload`, `free` and `accumulate-cpu`. Gradients arrive on the host in two buffers (see arrivals.py):
        a copy waits for the additions of those whose bytes it takes. If passes have several micro-batches, each of
        their gradients ends with `begin-total` or `accumulate` before the next one is made, whoever will use the total.
        Between two passes a total may leave and return.
    """

    options: tuple[int, ...]
    item_bytes: dict[Item, int]
    resident: tuple[Item, ...]
    computes: dict[str, ComputeSpec]
    update_cpu_s: dict[str, float]
    update_device_s: dict[str, float]
    rates: Rates
    device_budget_bytes: int
    host_budget_bytes: int
    host_bytes: int
    forward: tuple[Action, ...] = field(default=())
    backward: tuple[Action, ...] = field(default=())
    turn_around: tuple[Action, ...] = field(default=())
    gate: bool = False
    micro_batches: int = 1
    lead: tuple[Pass, ...] = field(default=())
    add_cpu_s: dict[str, float] = field(default_factory=dict)
    add_device_s: dict[str, float] = field(default_factory=dict)
    homes: dict[Item, str] = field(default_factory=dict)
    per_step: int = 1
    last_per_step: int = 0
    log_cpu_s: dict[str, float] = field(default_factory=dict)

    def path_of(self, item: Item) -> Path:
        """Return the path on which an item leaves and returns."""
        return self.rates.paths[self.homes.get(item, HOST)]

    @cached_property
    def states_in_files(self) -> frozenset[str]:
        """The tensors whose optimizer states have their homes in files, and not in RAM.

        RAM is short as soon as any state has its home on a tier for states. With such a tier, it is also short if it
        cannot hold everything that comes back from the device before another plan runs. All states then have their
        homes there but those that the host updates in RAM and those of which everything leaves to RAM. Of the others,
        RAM has only the pieces that leave to it, while they are away.
        """
        files = {tier.name for tier in self.rates.tiers if tier.for_states}
        leaving = {action.item for action in self.actions if action.kind is Kind.OFFLOAD}
        from_files = self.updated_from_files
        leave = any(item.kind is ItemKind.STATE and self.homes.get(item) in files for item in leaving)
        short = bool(files) and self._rest_bytes(()) > self.host_budget_bytes
        if not (leave or from_files or short):
            return frozenset()
        to_ram = {item for item in leaving if self.homes.get(item) not in files}
        in_ram = {name for name, own in self.states.items() if to_ram.issuperset(own)}
        return frozenset(self.update_device_s.keys() - in_ram) | from_files

    @property
    def rest_bytes(self) -> int:
        """Bytes of RAM once all parameters and optimizer states have come back to it from the device.

        They do before another plan runs, and when somebody reads them.
        """
        return self._rest_bytes(self.states_in_files)

    def _rest_bytes(self, in_files: Collection[str]) -> int:
        to_ram = {a.item for a in self.actions if a.kind is Kind.OFFLOAD and a.item not in self.homes}
        states = (self.states.get(name, ()) for name in self.update_device_s if name not in in_files)
        kept = {item for own in states if to_ram.isdisjoint(own) for item in own}
        return self.host_layout.used_bytes + sum(self.item_bytes[item] for item in kept)

    @cached_property
    def updated_from_files(self) -> frozenset[str]:
        """The tensors that the host updates and whose optimizer states lie in files."""
        return frozenset(items_named(self.homes, ItemKind.STATE) & self.update_cpu_s.keys())

    @cached_property
    def in_two_slots(self) -> frozenset[str]:
        """Those of them that are updated before the gate: the new states get a second place in the files."""
        early = {action.name for action in self.actions if action.kind is Kind.SPECULATE_CPU}
        return self.updated_from_files & early

    @property
    def second_slots_bytes(self) -> int:
        """Bytes of the second places of these states in the files."""
        return sum(self.item_bytes[item] for name in self.in_two_slots for item in self.states[name])

    @property
    def ring_bytes(self) -> int:
        """Bytes of the host's memory through which these states pass, one piece after another."""
        return RING_PIECES * max(map(self.passing_bytes_of, self.pieces_updated_from_files), default=0)

    @property
    def pieces_updated_from_files(self) -> tuple[Item, ...]:
        """The items of these states."""
        return tuple(item for name in sorted(self.updated_from_files) for item in self.states[name])

    def passing_bytes_of(self, item: Item) -> int:
        """Return the bytes that pass the host for an item of these states: the parameter's rows, too, if in files."""
        values = Item(ItemKind.PARAMETER, item.name)
        own = self.share_of_state(item, self.item_bytes[values]) if values in self.homes else 0
        return self.item_bytes[item] + own

    @cached_property
    def trained_homes(self) -> frozenset[Item]:
        """The trained parameters that have their homes on a tier other than the host."""
        of_frozen = {tier.name for tier in self.rates.tiers if not tier.for_parameters}
        found = (item for item, home in self.homes.items() if home not in of_frozen)
        return frozenset(item for item in found if item.kind is ItemKind.PARAMETER)

    @cached_property
    def parameters_in_files(self) -> frozenset[str]:
        """The trained parameters that have their homes in files, and not in RAM."""
        return frozenset(items_named(self.trained_homes, ItemKind.PARAMETER)) | self.cast_parameters

    @cached_property
    def cast_parameters(self) -> frozenset[str]:
        """The parameters that come from float32 copies in RAM; they themselves are in files, written when read."""
        casts = {tier.name for tier in self.rates.tiers if tier.casts}
        return frozenset(item.name for item, home in self.homes.items() if home in casts)

    @cached_property
    def values_in_files(self) -> frozenset[Item]:
        """The activations and interface values that leave to a tier for states."""
        files = {tier.name for tier in self.rates.tiers if tier.for_states}
        return frozenset(item for item, home in self.homes.items() if item.kind.by_batch and home in files)

    @cached_property
    def returns(self) -> Counter[Item]:
        """How often interface values return in a pass: each time from the one copy that has left."""
        first = self.passes[0]
        moved = (a.item for a in first.forward + first.backward if a.kind is Kind.PREFETCH)
        return Counter(item for item in moved if item.kind is ItemKind.VALUE)

    @property
    def bytes_in_files(self) -> int:
        """The bytes of all states and trained parameters whose homes are in files, each of them once."""
        own = [item for name in self.states_in_files for item in self.states.get(name, ())]
        own += [Item(ItemKind.PARAMETER, name) for name in self.parameters_in_files]
        return sum(self.item_bytes.get(item, 0) for item in own)

    @property
    def most_bytes_in_files(self) -> int:
        """The bytes that files need: those of `bytes_in_files`, of second places, and of values that leave there."""
        values = sum(self.item_bytes[item] for item in self.values_in_files)
        return self.bytes_in_files + self.second_slots_bytes + values

    @property
    def tiers(self) -> tuple[tuple[Tier, int], ...]:
        """Every tier but the device, the host first, and the bytes that the schedule needs there."""
        written = self.trained_homes
        leaving = [(i, home) for i, home in self.homes.items() if i.kind is not ItemKind.PARAMETER or i in written]
        leaving += [(i, self.homes[i]) for name in self.in_two_slots for i in self.states[name]]
        files = next((tier.name for tier in self.rates.tiers if tier.for_states), None)
        leaving += [(Item(ItemKind.PARAMETER, name), files) for name in self.cast_parameters if files is not None]
        away = [(tier, sum(self.item_bytes[item] for item, home in leaving if home == tier.name))
                for tier in self.rates.tiers]  # fmt: skip
        return ((Tier(self.rates.host, self.host_budget_bytes), self.host_layout.used_bytes), *away)

    @cached_property
    def host_layout(self) -> HostLayout:
        """The host memory that the schedule needs; items that are there at different times share it if they have to.

        They have to if the budget does not let each have its own. A place is not used again in the step in which it
        becomes free, nor, as long as the budget allows, in the next ones, so that copies wait for nothing.
        """
        if self.host_bytes <= self.host_budget_bytes:
            return HostLayout(self.host_bytes)
        stays, n_times = _stays_on_host(self)
        items, own_bytes = tuple(stays), self.host_bytes - sum(self.item_bytes[item] for item in stays)
        for spare in _SPARE_STEPS:
            tenants = tuple(
                Tenant(self.item_bytes[i], reduce(or_, (span_of(a, n + spare, n_times) for a, n in stays[i])))
                for i in items
            )
            found = packed(tenants)
            if own_bytes + found.bytes <= self.host_budget_bytes:
                break
        if own_bytes + found.bytes >= self.host_bytes:  # tiny items, which the alignment of places makes larger
            return HostLayout(self.host_bytes)
        places = {item: (start, start + self.item_bytes[item]) for item, start in zip(items, found.places)}
        return HostLayout(own_bytes + found.bytes, places, found.bytes)

    @property
    def passing_bytes(self) -> int:
        """The bytes of all items that are on the host for a part of the iteration only."""
        return sum(self.item_bytes[item] for item in _stays_on_host(self)[0])

    @cached_property
    def states(self) -> dict[str, tuple[Item, ...]]:
        """By tensor, the items of its optimizer state on the device, first rows first."""
        found: dict[str, list[Item]] = {}
        for item in self.item_bytes:
            if item.kind is ItemKind.STATE:
                found.setdefault(item.name, []).append(item)
        return {tensor: tuple(sorted(items, key=lambda item: item.rows or (0, 0))) for tensor, items in found.items()}

    def share_of_state(self, item: Item, size_bytes: int) -> int:
        """Return an item's share of bytes that its tensor's state takes in total; all if the state has no bytes."""
        items = self.states.get(item.name, ())
        return size_bytes * self.item_bytes[item] // sum(self.item_bytes[one] for one in items) if items else size_bytes

    @cached_property
    def known_effects(self) -> dict[tuple[Kind, str], Any]:
        """The cache of `effects.effect`, by kind and name of an action."""
        return {}

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The distinct passes in order; a middle one stands for all between the first and the last."""
        return (*self.lead, Pass(self.forward, self.backward))

    def pass_of(self, m: int) -> Pass:
        """Return the actions of pass `m` of an update, counted from 0; raises IndexError beyond the last."""
        if not 0 <= m < self.micro_batches:
            raise IndexError(f"pass {m} of {self.micro_batches}")
        return self.passes[-1] if m == self.micro_batches - 1 else self.passes[min(m, 1)]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of an iteration in order, with one middle pass at most."""
        parts: list[Part] = []
        for number, (one, runs_for) in enumerate(zip(self.passes, passes_of(self.micro_batches))):
            parts.append(Part(Direction.FORWARD, number, runs_for, one.forward))
            parts.append(Part(Direction.BACKWARD, number, runs_for, one.backward))
        once = (self.micro_batches - 1, self.micro_batches)
        return (*parts, Part(Direction.TURN_AROUND, len(self.passes) - 1, once, self.turn_around))

    @property
    def actions(self) -> tuple[Action, ...]:
        """All actions of an iteration, in order, with one middle pass at most."""
        return tuple(action for part in self.parts for action in part.actions)


def _stays_on_host(schedule: Schedule) -> tuple[dict[Item, list[tuple[int, int]]], int]:
    """Find the items that are on the host for a part of the iteration only.

    Returns: by item, the first time of each stay and the number of times that it lasts, where a time is a run of
    actions of the same step; and the number of times in an iteration, after which they come again.
    """
    # A total is there from the first pass on.
    kinds = (ItemKind.LOG,) if schedule.adds_up else (ItemKind.LOG, ItemKind.GRADIENT)
    tried: list[str] = []
    runs = [list(actions) for _, actions in groupby(schedule.actions, key=lambda action: action.step)]
    events: dict[Item, list[tuple[int, bool]]] = {}
    for time, run in enumerate(runs):
        for action in run:
            if action.kind is Kind.SPECULATE_CPU:
                tried.append(action.name)
            for item, comes in _at_host(action, tried):
                if (item.kind.by_batch or item.kind in kinds) and item not in schedule.homes:
                    events.setdefault(item, []).append((time, comes))
    stays: dict[Item, list[tuple[int, int]]] = {}
    for item, found in events.items():
        for k, (time, comes) in enumerate(found):
            ends = [at - time for at, again in found[k + 1 :] if not again]
            ends += [at - time + len(runs) for at, again in found[:k] if not again]
            if comes and ends:
                last = ends[max(schedule.returns[item], 1) - 1]
                stays.setdefault(item, []).append((time, last + 1))
    return stays, len(runs)


def takes_on_host(action: Action) -> Item | None:
    """Return the item for which an action begins to need memory of the host; None if for none."""
    if action.kind is Kind.SPECULATE_CPU:
        return Item(ItemKind.LOG, action.name)
    return action.item if action.kind is Kind.OFFLOAD else None


def _at_host(action: Action, tried: list[str]) -> list[tuple[Item, bool]]:
    """Return the items that an action puts on the host (True), or whose copies there it needs last (False).

    Parameters
    ----------
    tried: the tensors whose updates have started before the gate.
    """
    if action.kind in (Kind.UPDATE_CPU, Kind.UPDATE_DEVICE):
        return [(Item(ItemKind.GRADIENT, action.name), False)]
    taken = takes_on_host(action)
    if taken is not None:
        return [(taken, True)]
    if action.kind is Kind.COMPUTE and action.name == "gate":
        return [(Item(kind, name), False) for name in tried for kind in (ItemKind.LOG, ItemKind.GRADIENT)]
    # After a failure, the host makes an update from the copy of a gradient that has returned to the device.
    returns = action.kind is Kind.PREFETCH and action.item.kind is not ItemKind.GRADIENT
    return [(action.item, False)] if returns else []
