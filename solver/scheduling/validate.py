"""The rules of a valid schedule: items are present when read, none leaves too early, the cycle closes, budgets hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from .. import items
from ..compute_names import parse
from ..effects import resident_at
from ..items import Item, ItemKind
from ..schedule import ABOUT_ITEMS, Action, Kind, Schedule
from ..simulate import memory_highs
from .state import ScheduleError as ScheduleError
from .state import State, require

_UPDATES = (Kind.UPDATE_CPU, Kind.UPDATE_DEVICE)
_SHOWN = 4  # actions shown before and after the invalid one
_DEVICE_SUMS = (Kind.BEGIN_TOTAL, Kind.ACCUMULATE)


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError for the first action that cannot be carried out, with the reason.

    Checked are names; that items are resident when computes and updates read them; that prefetched items have host
    copies; gradients and updates (each tensor once per iteration, every compute with values of the last update); that
    an iteration ends with the items with which the next one starts; and the device and host budgets at every action.

    Parameters
    ----------
    schedule: one iteration.

    Raises: ScheduleError; if a single action is at fault, the message shows it among its neighbours.
    """
    try:
        _check(schedule)
    except ScheduleError as error:
        if error.action is None:
            raise
        raise ScheduleError(f"{error}\n{_around(schedule, error.action)}", error.action) from None


def _around(schedule: Schedule, wrong: Action) -> str:
    """Return the actions before and after an invalid one, which is marked."""
    actions = schedule.actions
    places = [i for i, action in enumerate(actions) if action is wrong] or [actions.index(wrong)]
    first = max(0, places[0] - _SHOWN)
    shown = actions[first : places[0] + _SHOWN + 1]
    return "\n".join(f"{'-->' if i == places[0] else '   '} {action}" for i, action in enumerate(shown, first))


def _check(schedule: Schedule) -> None:
    _check_names(schedule)
    _check_gate(schedule)
    _check_passes(schedule)
    state = State(schedule)
    # The first walk determines the host's contents at the end of an iteration, with which the second one starts.
    for known in (False, True):
        state.begin(known)
        for m in range(state.walked):
            one = schedule.passes[-1] if m + 1 == state.walked else schedule.pass_of(min(m, 1))
            for action in one.forward + one.backward:
                state.take(action)
            if m + 1 < state.walked:
                state.close_pass(resident_at(schedule, 1))
        for action in schedule.turn_around:
            state.take(action)
        state.close()
    _check_budgets(schedule)


def is_valid(schedule: Schedule) -> bool:
    """Return whether a schedule keeps every rule; moving actions can break some."""
    try:
        validate(schedule)
    except ScheduleError:
        return False
    return True


def _check_names(schedule: Schedule) -> None:
    for row, why in schedule.rates.faults():
        require(False, row, why)
    for name, seconds in _seconds(schedule):
        finite = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 <= seconds < inf
        require(finite, name, f"takes {seconds!r} seconds; that must be finite and not negative")
    require(schedule.host_bytes >= 0, "host_bytes", f"is {schedule.host_bytes}, must not be negative")
    for item, tier in schedule.homes.items():
        require(item in schedule.item_bytes, f"home of {item}", "no such item")
        require(tier in schedule.rates.paths, f"home of {item}", f"there is no tier {tier!r}")
        if item.kind is ItemKind.PARAMETER:
            _check_home(schedule, item, tier)
        elif item.name in schedule.updated_from_files:
            _check_update_from_files(schedule, item, tier)
        else:
            require(item.kind.roams, f"home of {item}", "items of this kind may leave only to the host")
            _check_tier_of_value(schedule, item, tier)
    resident = schedule.resident
    require(list(resident) == sorted(set(resident)), "resident", "items must ascend without repeats")
    for item in resident:
        require(item in schedule.item_bytes, f"resident {item}", "no such item")
    for item, size in schedule.item_bytes.items():
        require(size > 0, f"item {item}", f"has {size} bytes; only items that occupy bytes are named")
    for name, spec in schedule.computes.items():
        for item in spec.needs + spec.makes + spec.drops:
            require(item in schedule.item_bytes, f"compute {name}", f"names {item}, which is not an item")
        change = sum(schedule.item_bytes[i] for i in spec.makes) - sum(schedule.item_bytes[i] for i in spec.drops)
        least = max(0, change)
        require(spec.rise_bytes >= least, f"compute {name}", f"rises by {spec.rise_bytes}, needs {least} bytes")


def _check_home(schedule: Schedule, item: Item, home: str) -> None:
    """Check that a parameter's tier beside the host is one that holds it, or one that it may leave to."""
    tier = next((one for one in schedule.rates.tiers if one.name == home), None)
    if tier is None:
        raise ScheduleError(f"home of {item}: {home!r} is no tier beside the host")
    if items.gradient(item.name) in schedule.item_bytes:
        if tier.casts:
            _check_cast(schedule, item)
            return
        why = "a trained parameter may leave only to the host or to a tier for parameters"
        require(tier.for_parameters, f"home of {item}", why)
        if item.name not in schedule.update_device_s:
            beside = any(schedule.homes.get(state) == home for state in schedule.states.get(item.name, ()))
            why = "the host updates it, and its state is not there"
            require(beside and item.name not in schedule.in_two_slots, f"home of {item}", why)
    else:
        why = "only a frozen parameter may come from a tier other than the host, and from one that holds it"
        require(tier.holds_frozen, f"home of {item}", why)


def _check_cast(schedule: Schedule, item: Item) -> None:
    """Check that a parameter that is cast from its float32 copy has that in RAM, where the host updates it."""
    in_ram = item.name in schedule.update_cpu_s and item.name not in schedule.updated_from_files
    require(in_ram, f"home of {item}", "only what the host updates in RAM is cast from its float32 copy")
    early = any(action.kind is Kind.SPECULATE_CPU for action in schedule.actions)
    require(not early, f"home of {item}", "updates before the gate keep old values, and cast parameters have none")


def _check_tier_of_value(schedule: Schedule, item: Item, home: str) -> None:
    """Check that an activation or interface value leaves to no tier that is for other things."""
    tier = next((one for one in schedule.rates.tiers if one.name == home), None)
    if item.kind.by_batch and tier is not None:
        why = "activations and interface values may leave only to the host or to a tier for them"
        require(tier.for_values or not tier.for_states, f"home of {item}", why)


def _check_update_from_files(schedule: Schedule, item: Item, home: str) -> None:
    """Check that a state that the host updates in files lies, with all of its pieces, on a tier for that."""
    tier = next((one for one in schedule.rates.tiers if one.name == home), None)
    why = "the host updates it, which takes a tier for host updates"
    require(tier is not None and tier.for_host_updates, f"home of {item}", why)
    for other in schedule.states[item.name]:
        require(schedule.homes.get(other) == home, f"home of {other}", f"is not that of {item}; a state has one home")


def _seconds(schedule: Schedule) -> Iterator[tuple[str, float]]:
    """Yield the seconds of everything that takes time, with its name."""
    for name, spec in schedule.computes.items():
        yield f"compute {name}", spec.seconds
    for field in ("update_cpu_s", "update_device_s", "log_cpu_s", "add_cpu_s", "add_device_s"):
        for name, seconds in getattr(schedule, field).items():
            yield f"{field} of {name}", seconds


def _check_passes(schedule: Schedule) -> None:
    """Check the number of passes, and how often each compute, update and addition happens."""
    many, expected = schedule.micro_batches, min(schedule.micro_batches, 3) - 1
    require(many >= 1, "micro_batches", f"is {many}, must be at least 1")
    slots, last = schedule.per_step, schedule.last_per_step
    require(slots >= 1, "per_step", f"is {slots}, must be at least 1")
    fewer = last == 0 or (0 < last < slots and many > 1)
    require(fewer, "last_per_step", f"is {last}; it must be less than per_step, {slots}, in the last of several passes")
    found = len(schedule.lead)
    require(found == expected, "lead", f"has {found} passes, {many} micro-batches need {expected}")
    require(many == 1 or schedule.gate, "micro_batches", f"is {many}; more than one needs a gate")
    for one, runs in zip(schedule.passes, (*(slots for _ in schedule.lead), schedule.last_slots)):
        computes = [a for a in one.forward + one.backward if a.kind is Kind.COMPUTE]
        named = [name for name in schedule.computes if name != "gate" and (runs == slots or parse(name).slot < runs)]
        _check_counts(computes, Kind.COMPUTE, named, 1)
    gate = [a for a in schedule.turn_around if a.kind is Kind.COMPUTE]
    _check_counts(gate, Kind.COMPUTE, ["gate"] if schedule.gate else [], 1)
    for kind, names, times in (
        (Kind.UPDATE_DEVICE, schedule.update_device_s, 1),
        (Kind.ACCUMULATE_CPU, schedule.add_cpu_s, expected + 1),
        (Kind.BEGIN_TOTAL, schedule.add_device_s, 1),
        (Kind.ACCUMULATE, schedule.add_device_s, expected * slots + schedule.last_slots - 1 if many > 1 else 0),
    ):
        _check_counts([a for a in schedule.actions if a.kind is kind], kind, names, times)
    on_host = [a for a in schedule.actions if a.kind in (Kind.UPDATE_CPU, Kind.SPECULATE_CPU)]
    _check_counts(on_host, Kind.UPDATE_CPU, schedule.update_cpu_s, 1)
    sides = (schedule.update_cpu_s, schedule.update_device_s)
    if schedule.sums_on_device:
        sides = ({}, schedule.update_cpu_s | schedule.update_device_s)
    for adds, updates in zip((schedule.add_cpu_s, schedule.add_device_s), sides) if many > 1 else ():
        for name in sorted(adds.keys() ^ updates.keys()):
            require(False, f"tensor {name}", "is not added up where it is updated")
    for action in schedule.actions:
        known = action.kind not in ABOUT_ITEMS or action.name in schedule.item_bytes
        require(known, action, "no such name")
        if action.kind in _DEVICE_SUMS:
            for item in (items.total(action.name), items.gradient(action.name)):
                require(item in schedule.item_bytes, action, f"adds up {item}, which is not an item")


def _check_counts(actions: Iterable[Action], kind: Kind, names: Iterable[str], times: int) -> None:
    """Check that each of `names` is the object of `times` of the actions, and that nothing else is."""
    left = dict.fromkeys(names, times)
    for action in actions:
        require(action.name in left, action, "no such name")
        left[action.name] -= 1
        often = {1: "twice in an iteration"}.get(times, f"more than {times} times in an iteration")
        require(left[action.name] >= 0, action, f"done {often}")
    for name, count in left.items():
        require(
            count == 0, f"{kind.value} {name}", "announced, but no action does it" + f" {times} times" * (times > 1)
        )


def _check_gate(schedule: Schedule) -> None:
    """Check that updates follow the compute "gate", in the turn-around part or in the first forward part."""
    speculated = [action for action in schedule.actions if action.kind is Kind.SPECULATE_CPU]
    for action in speculated:
        require(action.name in schedule.log_cpu_s, action, "keeps a log, but the schedule says nothing of its seconds")
        require(items.log(action.name) in schedule.item_bytes, action, "keeps a log that is not an item")
    if not schedule.gate:
        require(not speculated, speculated[0] if speculated else "gate", "comes before a gate, but there is none")
        return
    before = [*schedule.backward, *(a for p in schedule.passes[:-1] for a in p.backward)]
    before += [a for p in schedule.passes[1:] for a in p.forward]
    opens = next((i for i, action in enumerate(schedule.turn_around) if action.name == "gate"), 0)
    before += schedule.turn_around[:opens]
    may = set(map(id, (*schedule.backward, *schedule.turn_around[:opens])))
    for action in speculated:
        require(id(action) in may, action, "keeps a log, but not between the last micro-batch's backward and the gate")
    sums = _returning_sums(schedule)
    for action in before:
        require(action.kind not in _UPDATES, action, "updates before the last backward has ended and the gate is open")
        back = action.kind is Kind.PREFETCH and action.item.kind in items.WHOLE_GRADIENTS and id(action) not in sums
        require(not back, action, "returns before the gate, which scales it, is open")
    for action in schedule.passes[0].forward:
        require(action.kind is not Kind.UPDATE_DEVICE, action, "updates on the device outside the turn-around")
    require("gate" in schedule.computes, "gate", "there is no compute of that name")


def _returning_sums(schedule: Schedule) -> set[int]:
    """Return the actions, by identity, that bring back a total to which gradients are still to be added."""
    found: set[int] = set()
    added: set[str] = set()
    for action in reversed(schedule.actions if schedule.sums_on_device else ()):
        if action.kind is Kind.ACCUMULATE:
            added.add(action.name)
        elif action.kind is Kind.PREFETCH and action.item.kind is ItemKind.TOTAL and action.item.name in added:
            found.add(id(action))
    return found


def _check_budgets(schedule: Schedule) -> None:
    budget = schedule.device_budget_bytes
    for action, high in zip(schedule.actions, memory_highs(schedule)):
        require(high <= budget, action, f"{high} bytes on the device, the budget is {budget}")
    for tier, used in schedule.tiers:
        limit = tier.capacity_bytes
        require(used <= limit, tier.name, f"{used} bytes reserved, the budget is {limit}")
