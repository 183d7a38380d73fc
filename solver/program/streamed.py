"""The plan of last resort: every parameter comes in for each use and leaves after it, and all updates run on the host.

If a group has to be updated on the device, its states come in for the update only. Frozen groups come from files, if
there are any, so that they need no host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..handed import away_window, hands, most_away
from ..problem import Block, Group, Problem
from ..resources import HOST, Resource
from ..solution import ActivationFlow, Gap, GroupFlow, HandFlow, Solution, Status
from .spans import Span, Stay, around, span_of


def streaming_solution(problem: Problem) -> Solution:
    """Return a solution that needs no search and about the least device memory; its budgets are not checked.

    Returns: a solution of whole parts. Its seconds assume that nothing overlaps.
    """
    options = tuple(_least(block, i <= problem.n_blocks - 2) for i, block in enumerate(problem.blocks))
    groups = {group.name: _streamed(problem, group) for group in problem.groups}
    values = frozenset(v.name for v in problem.values if away_window(problem, v) is not None)
    step_s = _seconds(problem, options, groups, values)
    return Solution(
        status=Status.STREAMED,
        objective_s=sum(seconds * problem.times(step) for step, seconds in enumerate(step_s)),
        lower_bound_s=0.0,
        gap=1.0,
        solve_s=0.0,
        options=options,
        activations=tuple(_streamed_activations(problem, i, o) for i, o in enumerate(options)),
        offloaded_values=values,
        handed=tuple(HandFlow(hand, {HOST: 1.0}) for hand in hands(problem)),
        groups=groups,
        step_s=tuple(step_s),
    )


def _least(block: Block, may_offload: bool) -> int:
    """Return the option that keeps least between forward and backward; of several the one that moves least."""
    allowed = [o for o, option in enumerate(block.options) if may_offload or not option.offloaded_bytes]

    def bytes_of(o: int) -> tuple[int, int, float]:
        option = block.options[o]
        return option.saved_bytes, option.offloaded_bytes, option.backward_s

    return min(allowed, key=bytes_of)


def _streamed_activations(problem: Problem, i: int, option: int) -> ActivationFlow:
    if not problem.blocks[i].options[option].offloaded_bytes:
        return ActivationFlow()
    forward, backward = problem.runs[i][0]
    return ActivationFlow({forward: 1.0}, {backward: 1.0})


def _streamed(problem: Problem, group: Group) -> GroupFlow:
    span, total = span_of(problem, group), problem.n_steps
    if not group.trainable:
        gaps = tuple(_gap(stay, total) for stay in [*span.between, Stay(span.end, span.first)])
        return GroupFlow(gaps=gaps, sources={tier.name: 1.0 for tier in problem.sources(group)[:1]})
    on_device = problem.update == "planned" and group.side == "device"
    # What the host updates is away from its last use on, and does not return for its last gradient.
    unread = None if on_device else problem.last_read(group)
    gaps = tuple(_gap(stay, total, away=stay.after != unread) for stay in span.between)
    last = span.idle[-1]
    if problem.update == "external":
        return GroupFlow(cpu_part=1.0, grad_out={span.end: 1.0}, cpu_back={last: 1.0}, gaps=gaps)
    if on_device:
        return replace(_on_device(problem, group, span), gaps=gaps)
    update = {problem.first_certain_update(group): 1.0}
    led: dict[str, Any] = _led(problem, span)
    out, back = {span.end: 1.0}, {last: 1.0}
    led["from_files"] = float(problem.may_update_from_files(group))
    return GroupFlow(cpu_part=1.0, grad_out=out, cpu_update=update, cpu_back=back, gaps=gaps, **led)


def _led(problem: Problem, span: Span) -> dict[str, dict[int, float]]:
    """Let gradients, or totals, leave in every pass but the last; totals return for the next pass."""
    if not problem.adds_up:
        return {}
    out = {"lead_out": {span.points[-1]: 1.0}}
    back = {"lead_back": {span.points[-1] + problem.pass_steps - 1: 1.0}}
    return out | back if problem.sums_on_device else out


def _on_device(problem: Problem, group: Group, span: Span) -> GroupFlow:
    """Let gradients, new values and states leave as soon as they can, and return right before they are needed."""
    updated = problem.device_update(group)
    after = around(updated, span.first - 1, problem.n_steps)
    away: dict[str, Any] = {"drop": {updated: 1.0}, "back": {after[-1]: 1.0}} if len(after) > 2 else {}
    may = [step for step in around(updated, updated - 1, problem.n_steps) if not problem.in_middle(step)]
    states: dict[str, Any] = {"state_out": {may[0]: 1.0}, "state_in": {may[-1]: 1.0}} if group.state_bytes else {}
    waiting, returning = problem.waiting(group)
    wait: dict[str, Any] = {"wait_out": {waiting[0]: 1.0}, "wait_in": {returning[-1]: 1.0}} if returning else {}
    led: dict[str, Any] = _led(problem, span) if problem.sums_on_device else {}
    return GroupFlow(out={updated: 1.0}, **away, **wait, **states, **led)


def _gap(stay: Stay, total: int, away: bool = True) -> Gap:
    between = around(stay.after, (stay.before - 1) % total, total)[1:]
    if len(between) < 2 or not away:
        return Gap(stay.after, stay.before, 0.0, shifts=stay.shifts)
    return Gap(stay.after, stay.before, 1.0, {between[-1]: 1.0}, stay.shifts)


def _seconds(
    problem: Problem, options: tuple[int, ...], groups: dict[str, GroupFlow], values: Iterable[str]
) -> list[float]:
    rates, slots = problem.rates, problem.per_step
    seconds = [rates.manage_s] * problem.n_steps
    seconds[problem.first_turn_around] += problem.gate_s
    for begins in problem.each(0):
        seconds[begins] += problem.start_s
    for block, o, runs in zip(problem.blocks, options, problem.runs):
        option = block.options[o]
        for forward, backward in runs:
            seconds[forward] += option.forward_s + rates.copy_s(option.offloaded_bytes, Resource.OUT, slots)
            seconds[backward] += option.backward_s + rates.copy_s(option.offloaded_bytes, Resource.IN, slots)
    for group in problem.groups:
        _add_group(problem, group, groups[group.name], seconds)
    gone = set(values)
    for value in problem.values:
        if value.name in gone:
            for made, used in zip(problem.each(value.made), problem.each(value.uses[-1])):
                seconds[made] += rates.copy_s(value.bytes, Resource.OUT, slots)
                seconds[used] += rates.copy_s(value.bytes, Resource.IN, slots)
    for hand in hands(problem):
        for step in () if hand.left else problem.each(hand.made):
            seconds[step] += rates.copy_s(hand.bytes, Resource.OUT, most_away(problem))
        for step in (again for returns in hand.returns for again in problem.each(returns)):
            seconds[step] += rates.copy_s(hand.bytes, Resource.IN, most_away(problem))
    return seconds


def _add_group(problem: Problem, group: Group, flow: GroupFlow, seconds: list[float]) -> None:
    rates = problem.rates
    summed = problem.sums_on_device
    added_s = group.cpu_add_s if flow.lead_out and not summed else 0.0
    if group.trainable:
        seconds[problem.last_gradient(group)] += group.norm_s
    for step in (*flow.grad_out, *(again for out in flow.lead_out for again in problem.each(out)[:-1])):
        seconds[step] += rates.copy_s(group.grad_bytes, Resource.OUT, group.grad_copies)
    for step in (*flow.grad_out, *(again for out in flow.lead_out for again in problem.each(out)[1:-1])):
        seconds[step] += added_s
    for step in flow.cpu_update:
        seconds[step] += group.cpu_update_s
    if group.trainable and not flow.cpu_part:
        seconds[problem.device_update(group)] += group.device_update_s
        for step in problem.each(group.grad_steps[-1])[1:] if not summed else ():
            seconds[step] += group.device_add_s
    if group.trainable and summed:
        for step in problem.each(group.grad_steps[-1]):
            seconds[step] += problem.slots_at(step) * group.device_add_s
        for step in (again for into in flow.lead_back for again in problem.each(into)[:-1]):
            seconds[step] += rates.copy_s(group.grad_bytes, Resource.IN, group.grad_copies)
    params, grads = (group.param_bytes, group.param_copies), (group.grad_bytes, group.grad_copies)
    states = group.state_bytes, group.state_copies
    leaving = (flow.out, params), (flow.wait_out, grads), (flow.state_out, states)
    returning = (flow.wait_in, grads), (flow.state_in, states)
    for flows, link in ((leaving, Resource.OUT), (returning, Resource.IN)):
        for moved, (size, copies) in flows:
            for step in moved:
                seconds[step] += rates.copy_s(size, link, copies)
    back = [step + shift for gap in flow.gaps for step in gap.back for shift in gap.shifts]
    for step in [*flow.cpu_back, *flow.back, *back]:
        for link in (Resource.IN, *(rates.paths[tier].into for tier in flow.sources)):
            seconds[step] += rates.copy_s(group.param_bytes, link, group.param_copies)
