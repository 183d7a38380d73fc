"""A schedule's decisions for another batch of the same model: the same actions over items of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..compute_names import parse
from ..decisions import Decisions, TensorPlan
from ..items import Item
from ..problem import Problem
from ..schedule import Kind, Schedule
from .computes import compute_specs, item_sizes
from .validate import ScheduleError, validate

# What two schedules with the same actions have in common, whatever the sizes of their batches.
_SAME = ("forward", "backward", "turn_around", "lead", "resident", "options", "homes", "per_step", "last_per_step")


def follow(schedule: Schedule, problem: Problem) -> Schedule | None:
    """Return the schedule that takes the same actions for a problem with the same blocks and tensors.

    Parameters
    ----------
    schedule: valid for a problem that differs in sizes and seconds only.
    problem: its options are those that the schedule's option indices refer to.

    Returns: the schedule, valid for the problem's budgets; None if it would name other items or exceed a budget.
    """
    sizes = _sizes(schedule, problem)
    if sizes.keys() != schedule.item_bytes.keys():
        return None
    specs = compute_specs(problem, _decisions(schedule, problem), sizes)
    leaving = {a.item for a in schedule.actions if a.kind is Kind.OFFLOAD and a.item.kind.by_batch}
    leaving -= schedule.homes.keys()
    followed = replace(
        schedule,
        item_bytes=sizes,
        computes={name: specs.get(name, spec) for name, spec in schedule.computes.items()},
        **(problem.machine | {"rates": schedule.rates}),
        host_bytes=schedule.host_bytes + sum(sizes[item] - schedule.item_bytes[item] for item in leaving),
    )
    try:
        validate(followed)
    except ScheduleError:
        return None
    return followed


def excess_bytes(schedule: Schedule, other: Schedule) -> int | None:
    """Return by how many bytes at most another schedule's computes exceed a schedule's, action by action.

    This holds, too, if micro-batches of both run side by side, in different slots of the same steps.

    Parameters
    ----------
    other: for other batches of the same model.

    Returns: 0 if none does; None if the other one takes other actions, or if an item has more bytes there.
    """
    if any(getattr(schedule, part) != getattr(other, part) for part in _SAME) or (
        schedule.item_bytes.keys() != other.item_bytes.keys() or schedule.computes.keys() != other.computes.keys()
    ):
        return None
    if any(other.item_bytes[item] > size for item, size in schedule.item_bytes.items()):
        return None
    return max(0, *(_peak_bytes(other, name) - _peak_bytes(schedule, name) for name in schedule.computes))


def side_by_side(schedule: Schedule, slots: Sequence[Schedule]) -> Schedule:
    """Return a schedule of which each slot has the bytes and seconds of another one.

    Parameters
    ----------
    slots: by slot, schedules with the same actions; slots beyond them keep their own.
    """

    def of(slot: int) -> Schedule:
        return slots[slot] if slot < len(slots) else schedule

    return replace(
        schedule,
        item_bytes={item: of(item.slot if item.kind.by_batch else 0).item_bytes[item] for item in schedule.item_bytes},
        computes={name: of(parse(name).slot).computes[name] for name in schedule.computes},
    )


def _peak_bytes(schedule: Schedule, compute: str) -> int:
    """Return the most that a compute holds together with what it reads, some of which it releases before its peak."""
    spec = schedule.computes[compute]
    return spec.rise_bytes + sum(schedule.item_bytes[item] for item in spec.needs)


def _sizes(schedule: Schedule, problem: Problem) -> dict[Item, int]:
    """Return the schedule's sizes for items of parameters, and the problem's for items that depend on the batch."""
    own = {item: size for item, size in schedule.item_bytes.items() if not item.kind.by_batch}
    found = item_sizes(problem, _decisions(schedule, problem))
    return own | {item: size for item, size in found.items() if item.kind.by_batch}


def _decisions(schedule: Schedule, problem: Problem) -> Decisions:
    """Return the part of the decisions that sizes and specifications depend on."""
    return Decisions(
        tensors=tuple(
            TensorPlan(tensor.name, group.name, cpu=tensor.name in schedule.update_cpu_s)
            for group in problem.groups
            for tensor in group.tensors
        ),
        options=schedule.options,
        activations=(None,) * problem.n_blocks,
        offloaded_values=frozenset(),
    )
