"""Conversion of decisions to a schedule: actions in the order in which the executor takes them."""

from __future__ import annotations

from dataclasses import replace

from .. import items
from ..compute_names import BACKWARD, FORWARD, GATE, START, USER, ComputeName
from ..decisions import Decisions, TensorPlan, state_parts, stored_parts
from ..effects import with_actions
from ..handed import away_slots, most_away
from ..problem import RING_PIECES, Group, Problem, TensorSize, Value
from ..resources import HOST
from ..schedule import Action, Kind, Schedule
from .computes import compute_specs, item_sizes, value_uses
from .emitter import Emitted, Emitter, Order, leaves


def build_schedule(problem: Problem, decisions: Decisions) -> Schedule:
    """Return the schedule that carries out decisions; the caller validates it against the budgets.

    Parameters
    ----------
    problem: its blocks, sizes and budgets. decisions: one plan per tensor, and an option per block.

    Returns: the schedule. With an external update it starts after the user's update, otherwise with the forward.
    Source: design of the schedule; OffMate, section 4 (the operations of a step).
    """
    decisions = with_homes(problem, decisions)
    sizes = item_sizes(problem, decisions)
    emitter = Emitter(problem, sizes)
    _emit_computes(emitter)
    _emit_activations(emitter, decisions)
    plans = {plan.name: plan for plan in decisions.tensors}
    for group in problem.groups:
        for tensor in group.tensors:
            _emit_tensor(emitter, group, tensor, plans[tensor.name])
    parts = _parts(problem, sorted(emitter.entries))
    computes = compute_specs(problem, decisions, sizes)
    several, summed = problem.adds_up, problem.sums_on_device
    schedule = Schedule(
        options=decisions.options,
        item_bytes=sizes,
        resident=(),
        computes=computes,
        update_cpu_s=_shares(problem, plans, "cpu_update_s", cpu=True),
        update_device_s=_shares(problem, plans, "device_update_s", cpu=False),
        host_bytes=host_bytes(problem, decisions),
        gate=problem.gate,
        micro_batches=problem.micro_batches,
        per_step=problem.per_step,
        last_per_step=problem.last_per_step,
        add_cpu_s=_shares(problem, plans, "cpu_add_s", cpu=True) if several and not summed else {},
        add_device_s=_shares(problem, plans, "device_add_s", cpu=None if summed else False) if several else {},
        homes=emitter.homes,
        log_cpu_s=_logs(problem, plans) if problem.speculates else {},
        **problem.machine,
    )
    return with_actions(schedule, parts)


def _emit_computes(emitter: Emitter) -> None:
    problem = emitter.problem
    n = problem.n_blocks
    for slot in emitter.slots:
        for i, runs in enumerate(problem.runs):
            for forward, backward in runs:
                if slot < problem.slots_at(forward):
                    emitter.compute(forward, Order.COMPUTE, ComputeName(FORWARD, i, slot), slot)
                    emitter.compute(backward, Order.COMPUTE, ComputeName(BACKWARD, i, slot), slot)
        for start in problem.passes:
            if slot >= problem.slots_at(start):
                continue
            # All batches come in first, when the device holds nothing of what they become.
            emitter.compute(start, Order.COMPUTE, ComputeName(START, slot=slot), 0, urgency=-1)
            emitter.compute(start + n, Order.FIRST, ComputeName(USER, slot=slot), 0)
    for before, start in zip((problem.passes[-1], *problem.passes), problem.passes):
        for shared in problem.shared:
            last = shared.last_step if start == problem.passes[-1] else min(shared.last_step, problem.pass_steps - 1)
            emitter.free(start + last, items.shared(shared.name))
        for output in problem.outputs:
            emitter.free(start + n - 1, items.old_output(output.name), before)
    if problem.gate:
        emitter.compute(problem.first_turn_around, Order.FIRST, ComputeName(GATE), 0)


def _emit_activations(emitter: Emitter, decisions: Decisions) -> None:
    """Emit copies of offloaded values and of interface values, which are released after their last use."""
    problem = emitter.problem
    for start in problem.passes:
        for i, stay in enumerate(decisions.activations):
            if stay is not None:
                forward, backward = problem.runs[i][0]
                emitter.offload(start + stay.out, items.offloaded(i), start + forward, stay.tier)
                emitter.prefetch(start + stay.back, items.offloaded(i), start + backward)
        for value in problem.values:
            _emit_value(emitter, value, start, decisions)


def _emit_value(emitter: Emitter, value: Value, start: int, decisions: Decisions) -> None:
    """Emit the moves of a value, and those of its gradient, in the pass that begins in step `start`."""
    problem, item = emitter.problem, items.value(value.name)
    own = [(hand, away_slots(problem, numbers)) for hand, numbers in decisions.handed.items()
           if hand.item.name == value.name]  # fmt: skip
    for hand, tiers in own:
        emitter.hand_on(start, hand, tiers)
    if value.name in decisions.offloaded_values:
        last_forward, first_backward = value_uses(problem, value)
        tier = decisions.value_tiers.get(value.name, HOST)
        emitter.offload(
            start + last_forward,
            item,
            start + value.made,
            tier,
            there=[slot for hand, tiers in own if hand.goes_on for slot in tiers],
        )
        emitter.return_in_turn(start + first_backward, item)
    emitter.free(start + value.uses[-1], item)


def _emit_tensor(emitter: Emitter, group: Group, tensor: TensorSize, plan: TensorPlan) -> None:
    param = items.parameter(plan.name)
    if plan.source != HOST and (group.trainable or plan.has_copy):
        emitter.homes[param] = plan.source
    for gap in plan.gaps:
        if gap.back is not None:
            emitter.free(gap.after, param)
            emitter.prefetch(gap.back, param, gap.before)
    if not group.trainable:
        return
    if emitter.problem.sums_on_device:
        _emit_sums(emitter, group, plan)
    if plan.back is not None:
        emitter.prefetch(plan.back, param, group.uses[0])
    if plan.cpu:
        if plan.states_from is not None:
            emitter.homes |= dict.fromkeys(stored_parts(tensor), plan.states_from)
        _emit_host_update(emitter, group, plan)
    elif emitter.problem.update == "planned":
        _emit_device_update(emitter, group, tensor, plan)


def _emit_host_update(emitter: Emitter, group: Group, plan: TensorPlan) -> None:
    problem = emitter.problem
    last = problem.last_gradient(group)
    emitter.free(problem.last_read(group), items.parameter(plan.name))
    if plan.lead_out is not None and not problem.sums_on_device:
        for start in problem.passes[:-1]:
            _emit_gradient(emitter, plan, start + plan.lead_out, start + group.grad_steps[-1])
    if plan.grad_out is not None and problem.sums_on_device:
        emitter.offload(plan.grad_out, items.total(plan.name), last)
    elif plan.grad_out is not None:
        _emit_gradient(emitter, plan, plan.grad_out, last)
    if plan.cpu_update is not None:
        assert plan.back is not None
        urgency = (plan.back - plan.cpu_update) % emitter.problem.n_steps
        kind = Kind.SPECULATE_CPU if problem.is_logged(group, plan.cpu_update) else Kind.UPDATE_CPU
        emitter.add(plan.cpu_update, Order.UPDATE_CPU, kind, plan.name, urgency)


def _emit_gradient(emitter: Emitter, plan: TensorPlan, step: int, made: int) -> None:
    """Send a gradient out; with several micro-batches also add it up, before the next but one may follow it."""
    emitter.offload(step, items.gradient(plan.name), made)
    if emitter.problem.adds_up:
        emitter.add(step, leaves(step, made), Kind.ACCUMULATE_CPU, plan.name)


def _emit_sums(emitter: Emitter, group: Group, plan: TensorPlan) -> None:
    """Add every micro-batch's gradient to the total as it is complete; between passes the total may be away."""
    problem, total, made = emitter.problem, items.total(plan.name), group.grad_steps[-1]
    for start in problem.passes:
        for slot in range(problem.slots_at(start)):
            first = start == problem.passes[0] and not slot
            kind = Kind.BEGIN_TOTAL if first else Kind.ACCUMULATE
            emitter.add(start + made, Order.UPDATE_DEVICE, kind, plan.name, slot=slot)
    if plan.lead_out is not None and plan.lead_back is not None:
        for start in problem.passes[:-1]:
            emitter.offload(start + plan.lead_out, total, start + made)
            emitter.prefetch(start + plan.lead_back, total, start + made + problem.pass_steps)


def _emit_device_update(emitter: Emitter, group: Group, tensor: TensorSize, plan: TensorPlan) -> None:
    last, problem = plan.device_update, emitter.problem
    assert last is not None
    several = problem.adds_up
    for start in problem.passes if several and not problem.sums_on_device else ():
        kind = Kind.BEGIN_TOTAL if start == problem.passes[0] else Kind.ACCUMULATE
        emitter.add(start + group.grad_steps[-1], Order.UPDATE_DEVICE, kind, plan.name)
    emitter.add(last, Order.UPDATE_DEVICE, Kind.UPDATE_DEVICE, plan.name)
    whole = items.total(plan.name) if several else items.gradient(plan.name)
    if plan.grad_out is not None and plan.grad_back is not None:
        emitter.offload(plan.grad_out, whole, problem.last_gradient(group))
        emitter.prefetch(plan.grad_back, whole, last)
    emitter.add(last, Order.UPDATE_DEVICE, Kind.FREE, whole)
    if plan.out is not None:
        emitter.copy_out(plan.out, items.parameter(plan.name), last)
    if plan.drop is not None:
        emitter.free(plan.drop, items.parameter(plan.name))
    for part in state_parts(tensor, plan):
        if part.stay is not None:
            emitter.offload(part.stay.out, part.item, last, part.stay.tier)
            emitter.prefetch(part.stay.back, part.item, last)


def _parts(problem: Problem, entries: list[Emitted]) -> list[tuple[Action, ...]]:
    """Split the actions into those of every forward and backward, and of the turn-around."""
    n, last = problem.n_blocks, problem.first_turn_around
    barrier = problem.n_steps if problem.update == "planned" else last + 1

    def steps(first: int, end: int) -> tuple[Action, ...]:
        return tuple(entry.action for entry in entries if first <= entry.step < end)

    parts = [steps(start + half, start + half + n) for start in problem.passes for half in (0, n)]
    parts[0] = steps(barrier, problem.n_steps) + parts[0]
    return [*parts, steps(last, barrier)]


def _shares(problem: Problem, plans: dict[str, TensorPlan], seconds: str, *, cpu: bool | None) -> dict[str, float]:
    """Divide a group's seconds among its tensors by their gradients, for the host's, the device's (False), or all."""
    if problem.update == "external":
        return {}
    return {
        tensor.name: getattr(group, seconds) * tensor.grad_bytes / max(group.grad_bytes, 1)
        for group in problem.groups
        if group.trainable
        for tensor in group.tensors
        if cpu is None or plans[tensor.name].cpu == cpu
    }


def _logs(problem: Problem, plans: dict[str, TensorPlan]) -> dict[str, float]:
    whole = _shares(problem, plans, "cpu_log_s", cpu=True)
    of_params = _shares(problem, plans, "param_log_s", cpu=True)
    return {name: whole[name] if plans[name].states_from is None else of_params[name] for name in whole}


def with_homes(problem: Problem, decisions: Decisions) -> Decisions:
    """Return decisions in which parameters that are always on the device come from files where RAM is short.

    It is if others leave to files, or if it has no room for them. Nothing is read or written for them while a model
    trains. Their homes have the values for whoever reads them.
    """
    tiers = {tier.name for tier in problem.parameter_tiers}
    sizes = {tensor.name: tensor.param_bytes for group in problem.groups if group.trainable for tensor in group.tensors}
    plans = [plan for plan in decisions.tensors if sizes.get(plan.name)]
    staying = {plan.name for plan in plans if plan.source == HOST and not (plan.cpu or plan.has_copy)}
    if not tiers or not staying:
        return decisions
    none_leaves = all(plan.source not in tiers for plan in plans)
    if none_leaves and _host_bytes(problem, decisions) <= problem.host_budget_bytes:
        return decisions
    home = problem.parameter_tiers[0].name
    tensors = (replace(plan, source=home) if plan.name in staying else plan for plan in decisions.tensors)
    return replace(decisions, tensors=tuple(tensors))


def host_bytes(problem: Problem, decisions: Decisions) -> int:
    """Return the bytes in host memory that decisions need if everything there has memory of its own."""
    return _host_bytes(problem, with_homes(problem, decisions))


def _host_bytes(problem: Problem, decisions: Decisions) -> int:
    plans = {plan.name: plan for plan in decisions.tensors}
    tiers = _tiers_of_states(decisions)
    in_pieces = any(tier.for_states and tier.name in tiers for tier in problem.rates.tiers)
    trained = [(group, tensor, plans[tensor.name]) for group in problem.groups for tensor in group.tensors]
    total = sum(_host_bytes_of(problem, group, tensor, plan, in_pieces) for group, tensor, plan in trained)
    total += sum(_log_bytes_of(problem, group, tensor, plan) for group, tensor, plan in trained)
    for block, o, stay in zip(problem.blocks, decisions.options, decisions.activations):
        total += block.options[o].offloaded_bytes if stay is None or stay.tier == HOST else 0
    used = (
        {plan.source for plan in plans.values() if plan.cpu or plan.has_copy}
        | tiers
        | set(decisions.value_tiers.values())
    )
    used |= {tier for numbers in decisions.handed.values() for tier in numbers}
    used |= {stay.tier for stay in decisions.activations if stay is not None}
    total += sum(tier.buffers_bytes for tier in problem.rates.tiers if tier.name in used)
    passing = [t.passing_bytes(plan.source != HOST) for _, t, plan in trained if plan.states_from is not None]
    total += RING_PIECES * max(passing, default=0)
    on_host = decisions.offloaded_values - decisions.value_tiers.keys()
    total += sum(v.bytes for v in problem.values if v.name in on_host)
    for hand, numbers in decisions.handed.items():
        total += 0 if hand.of_leaving else numbers.get(HOST, 0) * hand.bytes // most_away(problem)
    return total + problem.arrival_bytes + problem.host_fixed_bytes


def _tiers_of_states(decisions: Decisions) -> set[str]:
    leaving = {stay.tier for plan in decisions.tensors for stay in plan.states}
    return leaving | {plan.states_from for plan in decisions.tensors if plan.states_from is not None}


def _host_bytes_of(problem: Problem, group: Group, tensor: TensorSize, plan: TensorPlan, in_pieces: bool) -> int:
    """Return a tensor's bytes on the host.

    Parameters
    ----------
    in_pieces: whether states have their homes in files, so that RAM has only the pieces that leave to it. Otherwise it
        reserves the whole state for any piece, which leaves to its place in it.
    """
    # What stays on the device is in RAM as well, or in the files that it was read from.
    hosted = plan.source == HOST and (group.trainable or plan.has_copy or not problem.sources(group))
    param_bytes = tensor.param_bytes * hosted
    if plan.cpu:
        return param_bytes + tensor.grad_bytes + tensor.state_bytes * (plan.states_from is None)
    to_ram = [tensor.piece_bytes(stay.rows) for stay in plan.states if stay.tier == HOST]
    states = sum(to_ram) if in_pieces else tensor.state_bytes * bool(to_ram)
    gradient_leaves = plan.grad_back is not None or plan.lead_out is not None
    return param_bytes + tensor.grad_bytes * gradient_leaves + states


def _log_bytes_of(problem: Problem, group: Group, tensor: TensorSize, plan: TensorPlan) -> int:
    logged = plan.cpu_update is not None and problem.is_logged(group, plan.cpu_update)
    if not logged:
        return 0
    return tensor.log_bytes if plan.states_from is None else tensor.param_bytes


def counted_to(schedule: Schedule, own: Problem, other: Problem) -> Schedule:
    """Return a schedule whose turn-around has the steps of another problem that differs only in their number."""
    first, last = own.first_turn_around, other.n_steps - 1
    share = other.turn_around_steps / max(own.turn_around_steps, other.turn_around_steps)
    counted = tuple(
        replace(action, step=min(last, first + int((action.step - first) * share))) for action in schedule.turn_around
    )
    return replace(schedule, turn_around=counted)
