"""Schedules as plain dictionaries for JSON, and as text for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .problem import Rates
from .schedule import Action, ComputeSpec, Kind, Schedule
from .simulate import memory_highs
from .validate import ScheduleError, validate

_FORMAT = "offmate-schedule"
_VERSION = 1
_PARTS = ("forward", "backward", "turn_around")
_PLAIN = ("item_bytes", "update_cpu_s", "update_device_s", "device_budget_bytes", "host_budget_bytes", "host_bytes")


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON's own types, with actions as text lines."""
    data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
    data |= {name: getattr(schedule, name) for name in _PLAIN}
    data |= {name: dict(data[name]) for name in _PLAIN if isinstance(data[name], dict)}
    data |= {"options": list(schedule.options), "resident": list(schedule.resident), "rates": asdict(schedule.rates)}
    data |= {"gate": True} if schedule.gate else {}
    data["computes"] = {
        name: {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(spec).items()}
        for name, spec in schedule.computes.items()
    }
    return data | {part: [str(action) for action in getattr(schedule, part)] for part in _PARTS}


def from_dict(data: dict[str, Any]) -> Schedule:
    """The schedule that `to_dict` gave `data` for, validated.

    Raises: ScheduleError if it is of another format or version, lacks something, or is not valid.
    """
    if data.get("format") != _FORMAT or data.get("version") != _VERSION:
        found = f"{data.get('format')!r}, version {data.get('version')!r}"
        raise ScheduleError(f"not a schedule of format {_FORMAT!r}, version {_VERSION}: found {found}")
    try:
        fields: dict[str, Any] = {name: data[name] for name in _PLAIN}
        fields |= {part: tuple(Action.parse(line) for line in data[part]) for part in _PARTS}
        schedule = Schedule(
            options=tuple(data["options"]),
            resident=tuple(data["resident"]),
            computes={name: _spec(spec) for name, spec in data["computes"].items()},
            rates=Rates(**data["rates"]),
            gate=bool(data.get("gate", False)),
            **fields,
        )
    except KeyError as error:
        raise ScheduleError(f"the schedule lacks {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ScheduleError(f"the schedule cannot be read: {error}") from error
    validate(schedule)
    return schedule


def _spec(data: dict[str, Any]) -> ComputeSpec:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return ComputeSpec(**fields)


def to_text(schedule: Schedule) -> str:
    """A schedule as lines for people: actions by part, with their bytes and the bytes on the device."""
    highs = iter(memory_highs(schedule))
    lines = [
        f"device budget {schedule.device_budget_bytes} B, host {schedule.host_bytes} of "
        f"{schedule.host_budget_bytes} B, options {' '.join(map(str, schedule.options))}",
        f"resident: {' '.join(schedule.resident)}",
    ]
    for part in _PARTS:
        lines.append(f"{part}:")
        for action in getattr(schedule, part):
            size = schedule.item_bytes[action.name] if _moves(action) else 0
            moved = f"{size} B" if size else ""
            lines.append(f"  {action!s:<40} {moved:>16} {next(highs):>16} B")
    return "\n".join(lines) + "\n"


def _moves(action: Action) -> bool:
    return action.kind in (Kind.PREFETCH, Kind.OFFLOAD, Kind.FREE)
