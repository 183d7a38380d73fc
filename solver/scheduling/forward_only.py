"""A forward without backward: parameters stream through the device, the next block's while this one computes."""

from __future__ import annotations

from .. import items
from ..items import Item, ItemKind
from ..problem import Problem
from ..schedule import Action, ComputeSpec, Kind, Schedule
from ..simulate import keeps_budgets, memory_highs
from .validate import validate


def stream_schedule(problem: Problem) -> tuple[Schedule | None, int]:
    """Return the schedule of a forward that starts and ends with no parameter on the device.

    Parameters
    ----------
    problem: its blocks run with their first options. Nothing is saved for a backward, so only forwards read groups and
        values. Groups that are in files come from there.

    Returns: the schedule, None if none fits the budgets; and the device bytes that this schedule needs, or, if none
    fits, those of the least demanding order.
    """
    least = 0
    for ahead in (1, 0):
        schedule = _stream(problem, ahead)
        least = max(memory_highs(schedule))
        if keeps_budgets(problem, schedule):
            validate(schedule)
            return schedule, least
    return None, least


def _stream(problem: Problem, ahead: int) -> Schedule:
    n = problem.n_blocks
    params = [
        {items.parameter(t.name): t.param_bytes for g in problem.groups if i in g.uses for t in g.tensors}
        for i in range(n)
    ]
    sizes = {item: size for block in params for item, size in block.items()}
    sizes |= {items.value(v.name): v.bytes for v in problem.values if v.bytes}
    sizes |= {items.shared(s.name): s.bytes for s in problem.shared if s.bytes}
    for kind in (items.output, items.old_output):
        sizes |= {kind(o.name): o.bytes for o in problem.outputs if o.bytes}
    # Outputs that depend on no parameter belong to the user until the next call.
    kept = [items.shared(s.name) for s in problem.shared if s.bytes and s.last_step >= n]
    actions: list[Action] = [Action(0, Kind.FREE, item) for item in kept]
    actions += [Action(0, Kind.PREFETCH, item) for item in params[0]]
    there = set(params[0])
    actions.append(Action(0, Kind.COMPUTE, "start"))
    for i in range(n):
        for soon in params[i : i + ahead + 1]:
            actions += [Action(i, Kind.PREFETCH, item) for item in soon if item not in there]
            there |= set(soon)
        actions.append(Action(i, Kind.COMPUTE, f"F{i}"))
        done = [item for item in params[i] if i + 1 >= n or not any(item in p for p in params[i + 1 : i + 2])]
        done += [items.value(v.name) for v in problem.values if v.uses[-1] == i and v.bytes]
        done += [items.shared(s.name) for s in problem.shared if s.bytes and s.last_step == i]
        there -= set(done)
        actions += [Action(i, Kind.FREE, item) for item in done]
    homes = {items.parameter(t.name): tier.name for g in problem.groups for tier in problem.sources(g)[:1]
             for t in g.tensors}  # fmt: skip
    hosted = sum(size for item, size in sizes.items() if item.kind is ItemKind.PARAMETER and item not in homes)
    old = [items.old_output(o.name) for o in problem.outputs if o.bytes]
    actions += [Action(n - 1, Kind.FREE, item) for item in old]
    return Schedule(
        options=(0,) * n,
        item_bytes=sizes,
        resident=tuple(sorted(old + kept)),
        computes=_computes(problem, params, sizes),
        update_cpu_s={},
        update_device_s={},
        host_bytes=hosted + problem.host_fixed_bytes + (problem.buffers_bytes if homes else 0),
        homes=homes,
        forward=tuple(actions),
        **problem.machine,
    )


def _computes(problem: Problem, params: list[dict[Item, int]], sizes: dict[Item, int]) -> dict[str, ComputeSpec]:
    shared = [items.shared(s.name) for s in problem.shared if items.shared(s.name) in sizes]
    specs = {"start": ComputeSpec(problem.start_s, makes=tuple(shared), rise_bytes=problem.start_peak_bytes)}
    for i, block in enumerate(problem.blocks):
        option = block.options[0]
        needs = [*params[i], *(items.value(v.name) for v in problem.values if i in v.uses and v.bytes)]
        makes = [items.value(v.name) for v in problem.values if v.made == i and v.bytes]
        makes += [items.output(o.name) for o in problem.outputs if o.made == i and o.bytes]
        specs[f"F{i}"] = ComputeSpec(option.forward_s, tuple(needs), tuple(makes), rise_bytes=option.forward_peak_bytes)
    return specs
