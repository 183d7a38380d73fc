"""Decisions become a schedule: actions in the order in which the executor takes them."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from .computes import compute_specs, item_sizes, resident_items, value_uses
from .decisions import Decisions, TensorPlan
from .problem import Group, Problem, TensorSize
from .schedule import Action, Kind, Schedule


class _Slot(IntEnum):
    """The order of actions within a step."""

    FIRST = 0  # the user's code and the gate run before their part may bring anything in
    PREFETCH = 1
    OFFLOAD_EARLIER = 2  # what exists when the step starts goes out while it computes
    UPDATE_CPU = 3
    COMPUTE = 4
    UPDATE_DEVICE = 5
    OFFLOAD_MADE = 6
    FREE = 7


class _Entry(NamedTuple):
    """One action with what sorts it: step, slot, urgency (0 first), and the order of emission."""

    step: int
    slot: _Slot
    urgency: int
    order: int
    action: Action


class _Emitter:
    """Collects entries; the only mutable thing here."""

    def __init__(self, problem: Problem, sizes: dict[str, int]) -> None:
        self.problem = problem
        self.sizes = sizes
        self.entries: list[_Entry] = []

    def add(self, step: int, slot: _Slot, kind: Kind, name: str, urgency: int = 0) -> None:
        self.entries.append(_Entry(step, slot, urgency, len(self.entries), Action(step, kind, name)))

    def offload(self, step: int, item: str, made: int) -> None:
        """Send `item`, made in step `made`, out in `step` and release it at the step's end."""
        if item in self.sizes:
            self.copy_out(step, item, made)
            self.add(step, _Slot.FREE, Kind.FREE, item)

    def copy_out(self, step: int, item: str, made: int) -> None:
        slot = _Slot.OFFLOAD_MADE if step == made else _Slot.OFFLOAD_EARLIER
        if item in self.sizes:
            self.add(step, slot, Kind.OFFLOAD, item)

    def prefetch(self, step: int, item: str, needed: int) -> None:
        """Bring `item` in in `step`; what is needed sooner comes first."""
        if item in self.sizes:
            urgency = (needed - step) % self.problem.n_steps
            self.add(step, _Slot.PREFETCH, Kind.PREFETCH, item, urgency)

    def free(self, step: int, item: str) -> None:
        if item in self.sizes:
            self.add(step, _Slot.FREE, Kind.FREE, item)


def build_schedule(problem: Problem, decisions: Decisions) -> Schedule:
    """The schedule that carries out decisions; the caller validates it against the budgets.

    Parameters
    ----------
    problem: blocks, sizes and budgets. decisions: one plan per tensor and an option per block.

    Returns: the schedule. With an external update it starts after the user's update, otherwise with the forward.
    Source: design of the schedule; OffMate, section 4 (the operations of a step).
    """
    sizes = item_sizes(problem, decisions)
    emitter = _Emitter(problem, sizes)
    _emit_computes(emitter)
    _emit_activations(emitter, decisions)
    plans = {plan.name: plan for plan in decisions.tensors}
    for group in problem.groups:
        for tensor in group.tensors:
            _emit_tensor(emitter, group, plans[tensor.name])
    forward, backward, turn_around = _parts(problem, sorted(emitter.entries))
    computes = compute_specs(problem, decisions, sizes)
    actions = (*forward, *backward, *turn_around)
    update_cpu_s, update_device_s = _update_seconds(problem, plans)
    return Schedule(
        options=decisions.options,
        item_bytes=sizes,
        resident=resident_items(actions, computes, sizes),
        computes=computes,
        update_cpu_s=update_cpu_s,
        update_device_s=update_device_s,
        rates=problem.rates,
        device_budget_bytes=problem.device_budget_bytes,
        host_budget_bytes=problem.host_budget_bytes,
        host_bytes=_host_bytes(problem, decisions, plans),
        forward=forward,
        backward=backward,
        turn_around=turn_around,
        gate=problem.gate,
    )


def _emit_computes(emitter: _Emitter) -> None:
    problem = emitter.problem
    n = problem.n_blocks
    emitter.add(0, _Slot.COMPUTE, Kind.COMPUTE, "start")
    for i in range(n):
        emitter.add(i, _Slot.COMPUTE, Kind.COMPUTE, f"F{i}")
        emitter.add(problem.backward_step(i), _Slot.COMPUTE, Kind.COMPUTE, f"B{i}")
    emitter.add(n, _Slot.FIRST, Kind.COMPUTE, "user")
    if problem.gate:
        emitter.add(problem.first_turn_around, _Slot.FIRST, Kind.COMPUTE, "gate")
    for shared in problem.shared:
        emitter.free(shared.last_step, f"x:{shared.name}")
    for output in problem.outputs:
        emitter.free(n - 1, f"old:{output.name}")


def _emit_activations(emitter: _Emitter, decisions: Decisions) -> None:
    """Copies of what the options offload, and interface values, which are released after their last use."""
    problem = emitter.problem
    for i, early in enumerate(decisions.early):
        back = problem.backward_step(i)
        emitter.offload(i + early, f"a:{i}", i)
        emitter.prefetch(back - early, f"a:{i}", back)
    for value in problem.values:
        item = f"v:{value.name}"
        if value.name in decisions.offloaded_values:
            last_forward, first_backward = value_uses(problem, value)
            emitter.offload(last_forward, item, value.made)
            emitter.prefetch(first_backward - 1, item, first_backward)
        emitter.free(value.uses[-1], item)


def _emit_tensor(emitter: _Emitter, group: Group, plan: TensorPlan) -> None:
    param = f"p:{plan.name}"
    for gap in plan.gaps:
        if gap.back is not None:
            emitter.free(gap.after, param)
            emitter.prefetch(gap.back, param, gap.before)
    if not group.trainable:
        return
    last = group.grad_steps[-1]
    if plan.back is not None:
        emitter.prefetch(plan.back, param, group.uses[0])
    if plan.cpu:
        _emit_host_update(emitter, plan, last)
    elif emitter.problem.update == "planned":
        _emit_device_update(emitter, plan)


def _emit_host_update(emitter: _Emitter, plan: TensorPlan, last: int) -> None:
    emitter.free(last, f"p:{plan.name}")
    if plan.grad_out is not None:
        emitter.offload(plan.grad_out, f"g:{plan.name}", last)
    if plan.cpu_update is not None:
        assert plan.back is not None
        urgency = (plan.back - plan.cpu_update) % emitter.problem.n_steps
        emitter.add(plan.cpu_update, _Slot.UPDATE_CPU, Kind.UPDATE_CPU, plan.name, urgency)


def _emit_device_update(emitter: _Emitter, plan: TensorPlan) -> None:
    last = plan.device_update
    assert last is not None
    emitter.add(last, _Slot.UPDATE_DEVICE, Kind.UPDATE_DEVICE, plan.name)
    emitter.add(last, _Slot.UPDATE_DEVICE, Kind.FREE, f"g:{plan.name}")
    if plan.out is not None:
        emitter.copy_out(plan.out, f"p:{plan.name}", last)
    if plan.drop is not None:
        emitter.free(plan.drop, f"p:{plan.name}")
    if plan.state_out is not None and plan.state_in is not None:
        emitter.offload(plan.state_out, f"s:{plan.name}", last)
        emitter.prefetch(plan.state_in, f"s:{plan.name}", last)


def _parts(
    problem: Problem, entries: list[_Entry]
) -> tuple[tuple[Action, ...], tuple[Action, ...], tuple[Action, ...]]:
    n = problem.n_blocks
    barrier = problem.n_steps if problem.update == "planned" else problem.first_turn_around + 1

    def steps(first: int, end: int) -> tuple[Action, ...]:
        return tuple(entry.action for entry in entries if first <= entry.step < end)

    return steps(barrier, problem.n_steps) + steps(0, n), steps(n, 2 * n), steps(2 * n, barrier)


def _update_seconds(problem: Problem, plans: dict[str, TensorPlan]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds per tensor, in proportion to its gradient, for the host's tensors and for the device's."""
    host: dict[str, float] = {}
    device: dict[str, float] = {}
    for group in problem.groups:
        if not group.trainable or problem.update == "external":
            continue
        for tensor in group.tensors:
            share = tensor.grad_bytes / max(group.grad_bytes, 1)
            if plans[tensor.name].cpu:
                host[tensor.name] = share * group.cpu_update_s
            else:
                device[tensor.name] = share * group.device_update_s
    return host, device


def _host_bytes(problem: Problem, decisions: Decisions, plans: dict[str, TensorPlan]) -> int:
    total = sum(_host_bytes_of(tensor, plans[tensor.name]) for group in problem.groups for tensor in group.tensors)
    total += sum(block.options[o].offloaded_bytes for block, o in zip(problem.blocks, decisions.options))
    return total + sum(v.bytes for v in problem.values if v.name in decisions.offloaded_values)


def _host_bytes_of(tensor: TensorSize, plan: TensorPlan) -> int:
    if plan.cpu:
        return tensor.param_bytes + tensor.grad_bytes + tensor.state_bytes
    return tensor.param_bytes * plan.hosted + tensor.state_bytes * (plan.state_out is not None)
