"""Conversion of schedules to plain dictionaries for JSON, and to text for people."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from .files import FileError, read_record
from .old_text import upgraded
from .schedule import ABOUT_ITEMS, Action, Direction, Schedule
from .scheduling.validate import ScheduleError, validate
from .simulate import memory_highs

_FORMAT = "offmate-schedule"
_VERSION = 2
_PARTS = ("forward", "backward", "turn_around")
_SUMS = ("add_cpu_s", "add_device_s")
_PLAIN = ("item_bytes", "update_cpu_s", "update_device_s", "device_budget_bytes", "host_budget_bytes", "host_bytes")


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """Convert a schedule to JSON's own types, with actions as text lines."""
    data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
    data |= {name: getattr(schedule, name) for name in _PLAIN}
    data |= {name: dict(data[name]) for name in _PLAIN if isinstance(data[name], dict)}
    data |= {"options": list(schedule.options), "resident": list(schedule.resident), "rates": schedule.rates.to_dict()}
    data |= {"gate": True} if schedule.gate else {}
    data |= {"homes": dict(schedule.homes)} if schedule.homes else {}
    data |= {"per_step": schedule.per_step} if schedule.per_step > 1 else {}
    data |= {"last_per_step": schedule.last_per_step} if schedule.last_per_step else {}
    data |= {"log_cpu_s": dict(schedule.log_cpu_s)} if schedule.log_cpu_s else {}
    data["computes"] = {
        name: {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(spec).items()}
        for name, spec in schedule.computes.items()
    }
    data |= {part: _lines(getattr(schedule, part)) for part in _PARTS}
    if schedule.micro_batches > 1:
        data |= {name: dict(getattr(schedule, name)) for name in _SUMS}
        data["micro_batches"] = schedule.micro_batches
        data["lead"] = [{"forward": _lines(p.forward), "backward": _lines(p.backward)} for p in schedule.lead]
    return data


def from_dict(data: dict[str, Any]) -> Schedule:
    """Rebuild and validate the schedule from a dictionary made by `to_dict`, of this or an earlier version.

    Raises: ScheduleError if the dictionary is of an unknown format or version, or incomplete, or if the schedule is not
    valid.
    """
    if not isinstance(data, dict):
        raise ScheduleError(f"not a schedule: expected an object, found {reprlib.repr(data)}")
    version = data.get("version")
    if data.get("format") != _FORMAT or type(version) is not int or not 1 <= version <= _VERSION:
        found = f"{reprlib.repr(data.get('format'))}, version {reprlib.repr(version)}"
        raise ScheduleError(f"not a schedule in format {_FORMAT!r}, version 1 to {_VERSION}: found {found}")
    try:
        body = {key: value for key, value in upgraded(data).items() if key not in ("format", "version")}
        schedule: Schedule = read_record(body, Schedule, "schedule")
        validate(schedule)
    except ScheduleError:
        raise
    except FileError as error:
        raise ScheduleError(f"the schedule cannot be read: {error}") from None
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ScheduleError(f"the schedule contradicts itself: {type(error).__name__}: {error}") from error
    return schedule


def _lines(actions: Iterable[Action]) -> list[str]:
    return [str(action) for action in actions]


def to_text(schedule: Schedule) -> str:
    """Format a schedule as lines for people: actions by part, with their bytes and the bytes on the device."""
    highs = iter(memory_highs(schedule))
    lines = [
        f"device budget {schedule.device_budget_bytes} B, host {schedule.host_layout.used_bytes} of "
        f"{schedule.host_budget_bytes} B, options {' '.join(map(str, schedule.options))}",
        f"resident: {' '.join(schedule.resident)}",
    ]
    lines += [f"{tier.name}: {used} of {tier.capacity_bytes} B" for tier, used in schedule.tiers[1:]]
    for title, actions in _titled(schedule):
        lines.append(f"{title}:")
        for action in actions:
            size = schedule.item_bytes[action.item] if action.kind in ABOUT_ITEMS else 0
            moved = f"{size} B" if size else ""
            lines.append(f"  {action!s:<40} {moved:>16} {next(highs):>16} B")
    return "\n".join(lines) + "\n"


def _titled(schedule: Schedule) -> list[tuple[str, tuple[Action, ...]]]:
    """Return the parts in order with their titles."""
    many, one = schedule.micro_batches, "micro-batch" if schedule.per_step == 1 else "pass"
    several = "micro-batches" if schedule.per_step == 1 else "passes"
    middle = f"each of {many - 2} middle {several}" if many > 3 else f"the middle {one}"
    of = {1: ("",), 2: (f" of the first {one}", " of the last one")}
    whose = of.get(many, (f" of the first {one}", f" of {middle}", " of the last one"))
    return [
        ("turn_around" if part.direction is Direction.TURN_AROUND else f"{part.direction.value}{whose[part.of_pass]}",
         part.actions)
        for part in schedule.parts
    ]  # fmt: skip
