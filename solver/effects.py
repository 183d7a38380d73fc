"""The effects of an action on items, and its duration and resource: defined here, and queried everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from . import items
from .compute_names import GATE
from .items import Item, ItemKind
from .resources import Resource
from .schedule import Action, Kind, Pass, Schedule


@dataclass(frozen=True)
class Stage:
    """A piece of a state that an update on the host reads from files, updates and writes back.

    Parameters
    ----------
    into, out: the links on which it is read and written. read_s, update_s, write_s: seconds of each.
    """

    item: Item
    bytes: int
    into: Resource
    out: Resource
    read_s: float
    update_s: float
    write_s: float


@dataclass(frozen=True)
class Effect:
    """The effects of an action.

    Parameters
    ----------
    resource: the resource that carries it out; None for a release, which takes no time. Computes and releases block the
        executor; everything else is queued.
    seconds: its duration if the resource has nothing else to do.
    beyond, beyond_s: the resource that carries it on if it passes the host's memory, and for how long; None otherwise.
    reads: items that must be on the device, complete, when it starts.
    writes: items on the device whose values it makes or changes.
    brings, releases: items that it puts on the device; items that it removes from it.
    host_reads, host_writes: items of which it needs complete copies off the device, on the host or on another tier;
        items of which it makes or changes such copies.
    moved_bytes: bytes copied between tiers.
    rise_bytes: the most by which the bytes on the device exceed their level at its start while it runs.
    growth_bytes: the level at its end minus that at its start; negative if bytes are released.
    stages: of an update on the host whose state comes from files, its pieces in order; their seconds make up its own.
    """

    resource: Resource | None
    seconds: float = 0.0
    reads: tuple[Item, ...] = ()
    writes: tuple[Item, ...] = ()
    brings: tuple[Item, ...] = ()
    releases: tuple[Item, ...] = ()
    host_reads: tuple[Item, ...] = ()
    host_writes: tuple[Item, ...] = ()
    moved_bytes: int = 0
    rise_bytes: int = 0
    growth_bytes: int = 0
    beyond: Resource | None = None
    beyond_s: float = 0.0
    stages: tuple[Stage, ...] = ()

    @cached_property
    def blocks(self) -> bool:
        """Return whether the executor carries it out before it takes the next action."""
        return self.resource is None or self.resource == Resource.COMPUTE

    @cached_property
    def awaits_arrival(self) -> tuple[Item, ...]:
        """The items that it reads or releases: their copies to the device must have ended before."""
        return (*self.reads, *(item for item in self.releases if item not in self.reads))

    @cached_property
    def awaits_departure(self) -> tuple[Item, ...]:
        """The items that it overwrites or releases: their copies to the host must have ended before."""
        return (*self.writes, *(item for item in self.releases if item not in self.writes))


def effect(action: Action, schedule: Schedule) -> Effect:
    """Return the effect of a schedule's action, cached per schedule.

    Raises: KeyError if the action names an item, compute or tensor that the schedule does not have.
    """
    known, key = schedule.known_effects, (action.kind, action.name)
    found = known.get(key)
    if found is None:
        found = known[key] = EFFECTS[action.kind](action, schedule)
    return found


# A backward adds to those that it reads and does not release.
_SUMS = (ItemKind.GRADIENT, ItemKind.PARTIAL, ItemKind.VALUE_GRADIENT)


def _compute(action: Action, schedule: Schedule) -> Effect:
    spec, sizes = schedule.computes[action.name], schedule.item_bytes
    adds = [item for item in spec.needs if item.kind in _SUMS and item not in spec.drops]
    on_host: tuple[Item, ...] = ()
    if action.name == GATE:  # an executor that clips reads and scales every gradient there
        gradients = [item for item in sizes if item.kind in items.WHOLE_GRADIENTS]
        on_host = (*gradients, *map(items.total, schedule.add_cpu_s))
    new = tuple(map(items.parameter, schedule.log_cpu_s)) if on_host else ()  # those made before are valid from here on
    return Effect(
        Resource.COMPUTE,
        spec.seconds,
        reads=spec.needs,
        writes=(*spec.makes, *adds),
        brings=spec.makes,
        releases=spec.drops,
        host_reads=on_host,
        host_writes=(*on_host, *new),
        rise_bytes=spec.rise_bytes,
        growth_bytes=sum(sizes[item] for item in spec.makes) - sum(sizes[item] for item in spec.drops),
    )


def _prefetch(action: Action, schedule: Schedule) -> Effect:
    item = action.item
    size, link = schedule.item_bytes[item], schedule.path_of(item).into
    beyond, beyond_s = _beyond(schedule, size, link)
    return Effect(
        link,
        schedule.rates.copy_s(size, link),
        writes=(item,),
        brings=(item,),
        host_reads=(item,),
        moved_bytes=size,
        rise_bytes=size,
        growth_bytes=size,
        beyond=beyond,
        beyond_s=beyond_s,
    )


def _offload(action: Action, schedule: Schedule) -> Effect:
    item = action.item
    size, link = schedule.item_bytes[item], schedule.path_of(item).out
    copy_s, (beyond, beyond_s) = schedule.rates.copy_s(size, link), _beyond(schedule, size, link)
    if beyond is not None:  # over the host's link first, and then on to the tier
        link, copy_s, beyond, beyond_s = beyond, beyond_s, link, copy_s
    return Effect(link, copy_s, reads=(item,), host_writes=(item,), moved_bytes=size, beyond=beyond, beyond_s=beyond_s)


def _beyond(schedule: Schedule, size_bytes: int, link: Resource) -> tuple[Resource | None, float]:
    """Return the host's link that a copy over a tier's link takes as well, and its seconds there."""
    beyond = schedule.rates.beyond(link)
    return beyond, schedule.rates.copy_s(size_bytes, beyond) if beyond is not None else 0.0


def _free(action: Action, schedule: Schedule) -> Effect:
    return Effect(None, releases=(action.item,), growth_bytes=-schedule.item_bytes[action.item])


def _update_cpu(action: Action, schedule: Schedule) -> Effect:
    parameter = items.parameter(action.name)
    gradient = _whole_gradient(action.name, schedule)
    return Effect(
        schedule.rates.worker(action.kind.value),
        schedule.update_cpu_s[action.name],
        host_reads=(gradient, parameter),
        host_writes=(parameter,),
        stages=tuple(_stages(action.name, schedule, 0.0)),
    )


def _stages(tensor: str, schedule: Schedule, log_s: float) -> Iterator[Stage]:
    """Yield the pieces of an update from files; the first one is preceded by the log."""
    if tensor not in schedule.updated_from_files:
        return
    rates, own = schedule.rates, schedule.states[tensor]
    total = sum(schedule.item_bytes[item] for item in own)
    for item in own:
        size, path = schedule.passing_bytes_of(item), schedule.path_of(item)
        read_s, write_s = (rates.copy_s(size, link) for link in path.links)
        update_s = schedule.update_cpu_s[tensor] * schedule.item_bytes[item] / total
        update_s += log_s if item == own[0] else 0.0
        yield Stage(item, size, path.into, path.out, read_s, update_s, write_s)


def _speculate_cpu(action: Action, schedule: Schedule) -> Effect:
    parameter, log = items.parameter(action.name), items.log(action.name)
    gradient = _whole_gradient(action.name, schedule)
    return Effect(
        schedule.rates.worker(Kind.UPDATE_CPU.value),
        schedule.update_cpu_s[action.name] + schedule.log_cpu_s[action.name],
        host_reads=(gradient, parameter, log),
        host_writes=(parameter, log),
        stages=tuple(_stages(action.name, schedule, schedule.log_cpu_s[action.name])),
    )


def _update_device(action: Action, schedule: Schedule) -> Effect:
    tensor = action.name
    written = (items.parameter(tensor), *schedule.states.get(tensor, ()))
    read = tuple(item for item in (*written, _whole_gradient(tensor, schedule)) if item in schedule.item_bytes)
    return Effect(Resource.COMPUTE, schedule.update_device_s[tensor], reads=read, writes=written)


def _begin_total(action: Action, schedule: Schedule) -> Effect:
    gradient, total, sizes = items.gradient(action.name), items.total(action.name), schedule.item_bytes
    return Effect(
        Resource.COMPUTE,
        reads=(gradient,),
        writes=(total,),
        brings=(total,),
        releases=(gradient,),
        growth_bytes=sizes[total] - sizes[gradient],
    )


def _accumulate(action: Action, schedule: Schedule) -> Effect:
    gradient, total = items.gradient(action.name), items.total(action.name)
    return Effect(
        Resource.COMPUTE,
        schedule.add_device_s[action.name],
        reads=(gradient, total),
        writes=(total,),
        releases=(gradient,),
        growth_bytes=-schedule.item_bytes[gradient],
    )


def _accumulate_cpu(action: Action, schedule: Schedule) -> Effect:
    gradient, total = items.gradient(action.name), items.total(action.name)
    worker = schedule.rates.worker(action.kind.value)
    return Effect(worker, schedule.add_cpu_s[action.name], host_reads=(gradient, total), host_writes=(total,))


def _whole_gradient(tensor: str, schedule: Schedule) -> Item:
    """Return the item that an update reads."""
    return items.total(tensor) if schedule.adds_up else items.gradient(tensor)


EFFECTS: dict[Kind, Callable[[Action, Schedule], Effect]] = {
    Kind.COMPUTE: _compute,
    Kind.PREFETCH: _prefetch,
    Kind.OFFLOAD: _offload,
    Kind.FREE: _free,
    Kind.UPDATE_CPU: _update_cpu,
    Kind.SPECULATE_CPU: _speculate_cpu,
    Kind.UPDATE_DEVICE: _update_device,
    Kind.BEGIN_TOTAL: _begin_total,
    Kind.ACCUMULATE: _accumulate,
    Kind.ACCUMULATE_CPU: _accumulate_cpu,
}


def computing_s(action: Action, schedule: Schedule) -> float:
    """Return the seconds for which an action keeps the device computing."""
    does = effect(action, schedule)
    return does.seconds if does.resource == Resource.COMPUTE else 0.0


def with_actions(schedule: Schedule, parts: Iterable[Iterable[Action]]) -> Schedule:
    """Return the schedule with other actions over the same items, its `resident` items determined anew.

    Parameters
    ----------
    parts: the actions of every forward, backward, and of the turn-around, as in `Schedule.parts`.
    """
    *walked, turn_around = _certain_behind_the_gate(parts) if schedule.log_cpu_s else map(tuple, parts)
    *lead, last = (Pass(*pair) for pair in zip(walked[::2], walked[1::2]))
    changed = replace(schedule, lead=tuple(lead), forward=last.forward, backward=last.backward, turn_around=turn_around)
    # An action's effect does not depend on the other actions.
    changed.known_effects.update(schedule.known_effects)
    found = replace(changed, resident=_resident(changed))
    found.known_effects.update(changed.known_effects)
    return found


def _certain_behind_the_gate(parts: Iterable[Iterable[Action]]) -> list[tuple[Action, ...]]:
    """Return the parts with updates that were to come before the gate, and come behind it now, as plain ones."""
    *walked, turn_around = map(tuple, parts)
    opens = next((i for i, action in enumerate(turn_around) if action.name == "gate"), len(turn_around))
    behind = tuple(_certain(action) for action in turn_around[opens:])
    first = tuple(map(_certain, walked[0]))  # of the next iteration
    return [first, *walked[1:], turn_around[:opens] + behind]


def _certain(action: Action) -> Action:
    return replace(action, kind=Kind.UPDATE_CPU) if action.kind is Kind.SPECULATE_CPU else action


def _resident(schedule: Schedule) -> tuple[Item, ...]:
    """List the items that an iteration starts with: those whose first mention does not bring them."""
    brought: dict[Item, bool] = {}
    for action in schedule.actions:
        does = effect(action, schedule)
        for item in does.awaits_arrival:
            brought.setdefault(item, False)
        for item in does.brings:
            brought.setdefault(item, True)
            if item.kind is ItemKind.OUTPUT and item.slot >= schedule.last_slots:  # the last pass leaves none of these
                brought.setdefault(items.after_pass(item), True)
    return tuple(sorted(item for item, by_action in brought.items() if not by_action))


def resident_at(schedule: Schedule, m: int) -> tuple[Item, ...]:
    """List the items on the device when pass `m` starts, by name; raises IndexError beyond the last."""
    schedule.pass_of(m)
    there = set(schedule.resident)
    if m > 0:  # all passes after the first start with the items that the first leaves
        for action in (action for part in schedule.parts if part.of_pass == 0 for action in part.actions):
            does = effect(action, schedule)
            there.difference_update(does.releases)
            there.update(does.brings)
        there = {items.after_pass(item) for item in there}
    return tuple(sorted(there))
