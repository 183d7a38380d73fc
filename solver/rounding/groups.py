"""Rounding of a solution's fractions to whole tensors (OffMate, section 4.2 and appendix B, Algorithm 1).

For each group the steps are walked from the last gradient on. SELECT chooses whole tensors so that every step moves out
at least, and brings in at most, the bytes of the fractions. OffMate's single walk is adapted to two disjoint parts, one
updated on the host and one on the device. Bytes that one group's whole tensors spare in a step may be used by later
groups, so that the errors even out. No step ever needs more device memory than the fractions need in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import accumulate

from ..decisions import Decisions, StateStay, TensorGap, TensorPlan
from ..handed import whole_numbers
from ..problem import Group, Problem
from ..solution import Gap, GroupFlow, Solution
from .activations import whole_activations
from .cast import Cast
from .host import host_chain
from .kept import keep
from .knapsack import select
from .sources import Sources, read_least
from .stored import Stored
from .tiers import Spread
from .walk import NOISE, Allowance, Curve, at_least, envelope, walk


def round_solution(problem: Problem, solution: Solution, *, host_is_full: bool = False) -> Decisions:
    """Round the fractions of a solution to whole tensors, never needing more device memory in any step.

    The bound on memory holds for groups whose tensors' parameters, gradients and states are in the same proportion
    ("one dtype triple"); a few bytes of deviation are caught by the validation of the schedule.

    Parameters
    ----------
    problem: the problem that was solved. solution: its answer, with one flow per group.

    Returns: one plan per tensor and the choices for activations, unchanged.
    Raises: ValueError if the solution holds no plan.
    Source: OffMate, appendix B, Algorithm 1.
    """
    if len(solution.options) != problem.n_blocks:
        raise ValueError(f"no plan to round: {solution.status.value}")
    plans: dict[str, TensorPlan] = {}
    spread = Spread.of(problem, solution)
    activations, spare = whole_activations(problem, solution, spread)
    excess_s, sources, stored, cast = 0.0, Sources(), Stored.of(problem, solution), Cast.of(problem, solution)
    spread.in_pieces |= stored.any
    for group in sorted(problem.groups, key=_last_step):
        flow = solution.groups.get(group.name, GroupFlow())
        # A byte of a state that leaves to files costs more than one of a parameter, which leaves to RAM.
        allowance = Allowance(problem, group, flow, spare, for_states=spread.in_pieces)
        rounded = _round_group(problem, group, flow, allowance, excess_s, spread, stored, host_is_full)
        rounded = cast.choose(problem, group, flow, sources.choose(group, flow, rounded))
        plans |= {plan.name: plan for plan in rounded}
        spare = allowance.spare
        part = sum(t.param_bytes for t in group.tensors if plans[t.name].cpu) / max(group.param_bytes, 1)
        excess_s += (part - flow.cpu_part) * group.cpu_update_s
    plans = keep(problem, plans.values(), spare) if spread.in_pieces else plans
    tensors = tuple(plans[tensor.name] for group in problem.groups for tensor in group.tensors)
    handed = {flow.hand: whole_numbers(problem, flow.tiers) for flow in solution.handed}
    values = solution.offloaded_values, solution.value_tiers, handed
    return read_least(problem, Decisions(tensors, solution.options, activations, *values))


def _last_step(group: Group) -> tuple[int, str]:
    return (group.grad_steps or group.uses)[-1], group.name


def _round_group(
    problem: Problem,
    group: Group,
    flow: GroupFlow,
    allowance: Allowance,
    excess_s: float,
    spread: Spread,
    stored: Stored,
    host_is_full: bool,
) -> list[TensorPlan]:
    """Round one group: parameters first, then states, then gradients: the device's, then the host's."""
    plans = [TensorPlan(tensor.name, group.name) for tensor in group.tensors]
    needs = [_gap_need(problem, allowance, gap) for gap in flow.gaps]
    most = max((need[0] for need in needs if need), default=0)
    if group.trainable:
        plans = _idle_gap(problem, group, flow, allowance, plans, excess_s, most)
        plans = stored.choose(problem, group, flow, plans)
        may_leave = {t.name: t.param_bytes for t, p in zip(group.tensors, plans) if p.cpu or p.has_copy}
    else:
        sizes = {tensor.name: tensor.param_bytes for tensor in group.tensors}
        may_leave = {name: sizes[name] for name in select(sizes, min(most, group.param_bytes))}
    for gap, need in zip(flow.gaps, needs):
        unread = group.trainable and gap.after == problem.last_read(group)
        by_host = {t.name: t.param_bytes for t, p in zip(group.tensors, plans) if p.cpu} if unread else {}
        others = {name: size for name, size in may_leave.items() if name not in by_host}
        plans = _gap(problem, plans, [max(0, n - sum(by_host.values())) for n in need], others, gap)
    # A tensor that never leaves needs no copy on the host.
    plans = [replace(p, out=None) if p.drop is None and not p.leaves else p for p in plans]
    allowance.use_params(plans)
    if not group.trainable:
        return plans
    plans = _states(problem, group, flow, allowance, plans, spread, host_is_full)
    allowance.use_states(plans)
    plans = _waits(problem, group, flow, allowance, plans)
    plans = _passed_on(problem, group, flow, allowance, plans)
    plans = host_chain(problem, group, flow, plans, allowance)
    allowance.use_grads(plans)
    return plans


def _idle_gap(
    problem: Problem,
    group: Group,
    flow: GroupFlow,
    allowance: Allowance,
    plans: list[TensorPlan],
    excess_s: float,
    most_in_gaps: int,
) -> list[TensorPlan]:
    """Choose the tensors updated on the host, and the steps in which tensors go out, are dropped and come back."""
    sizes = {tensor.name: tensor.param_bytes for tensor in group.tensors}
    last, updated = problem.last_gradient(group), problem.device_update(group)
    n = (group.uses[0] - last) % problem.n_steps
    host_part = _host_part(problem, group, flow, allowance, excess_s)
    part = sum(sizes[name] for name in host_part) / max(group.param_bytes, 1)
    if group.cpu_update_s > 0:
        excess = part - flow.cpu_part
        allowance.choose_host_part(excess, excess + excess_s / group.cpu_update_s)
    steps = [_step(problem, last, k) for k in range(1, n)]
    need = envelope([allowance.absent_params(step) for step in steps])
    outs = _outs(problem, group, flow, host_part, need, most_in_gaps)
    dropped, back = walk(
        sizes,
        need,
        host_part,
        lambda k: (name for name, out in outs.items() if out < k),
        _Returns(problem, group, flow, host_part),
    )

    return [
        replace(
            plan,
            cpu=plan.name in host_part,
            device_update=None if plan.name in host_part else updated,
            out=_step_of(problem, last, outs, plan.name),
            drop=_step_of(problem, last, dropped, plan.name),
            back=_step_of(problem, last, back, plan.name),
        )
        for plan in plans
    ]


def _host_part(
    problem: Problem, group: Group, flow: GroupFlow, allowance: Allowance, excess_s: float
) -> frozenset[str]:
    """Choose the tensors updated on the host: at least the fraction, minus the excess of other groups.

    It is less than the fraction only as far as the device can hold the rest, with its states, all the time.
    """
    if problem.update == "external" or group.side == "host":
        return frozenset(tensor.name for tensor in group.tensors)
    if group.side == "device":
        return frozenset()
    less = max(0.0, excess_s) / group.cpu_update_s if group.cpu_update_s > 0 else 0.0
    fraction = flow.cpu_part - min(less, allowance.room())
    sizes = {tensor.name: tensor.param_bytes for tensor in group.tensors}
    part = select(sizes, at_least(fraction, group.param_bytes))
    states = {tensor.name: tensor.state_bytes for tensor in group.tensors}
    short = at_least(fraction, group.state_bytes) - sum(states[name] for name in part)
    return part | select({name: size for name, size in states.items() if name not in part}, short)


def _outs(
    problem: Problem,
    group: Group,
    flow: GroupFlow,
    host_part: frozenset[str],
    need: list[int],
    most_in_gaps: int,
) -> dict[str, int]:
    """Return the position of the copy to the host, for the device tensors that get one; the host's part always has one.

    Tensors are copied in time for the bytes that must be absent, otherwise at the fractions' pace, and no more of them
    than some gap needs.
    """
    rest = {tensor.name: tensor.param_bytes for tensor in group.tensors if tensor.name not in host_part}
    curve = Curve(problem, problem.last_gradient(group), flow.out)
    most = max([*need, most_in_gaps])
    valid = group.param_bytes - sum(rest.values())
    outs: dict[str, int] = {}
    updated = (problem.device_update(group) - problem.last_gradient(group)) % problem.n_steps
    for k in range(updated, len(need) + 1):
        pace = most if k == len(need) else at_least(flow.cpu_part + curve.up_to(k), group.param_bytes)
        target = max([*need[: k + 1], min(most, pace)])
        going = select(rest, min(target - valid, sum(rest.values())))
        outs.update(dict.fromkeys(sorted(going), k))
        valid += sum(rest.pop(name) for name in going)
    return outs


class _Returns:
    """Yields the tensors that can come in at a position of the idle gap.

    The host's part comes back at the pace at which the fractions are updated, so that no update is rushed.
    """

    def __init__(self, problem: Problem, group: Group, flow: GroupFlow, host_part: frozenset[str]) -> None:
        last = problem.last_gradient(group)
        external = problem.update == "external"
        self._sizes = {tensor.name: tensor.param_bytes for tensor in group.tensors}
        self._host_part = host_part
        first = problem.first_turn_around + 1 if external else problem.first_return(group)
        self._earliest = (first - last) % problem.n_steps
        self._lag = 0 if external else 1
        self._pace = Curve(problem, last, flow.cpu_back if external else flow.cpu_update)
        self._scale = sum(self._sizes[name] for name in host_part) / max(flow.cpu_part, NOISE)

    def __call__(self, k: int, returned: Collection[str]) -> Iterable[str]:
        room = self._scale * self._pace.up_to(k - self._lag)
        room -= sum(self._sizes[name] for name in returned if name in self._host_part)
        for name, size in self._sizes.items():
            if name in returned:
                continue
            if name not in self._host_part:
                yield name
            elif k >= self._earliest and size / 2 <= room:
                room -= size
                yield name


def _gap_need(problem: Problem, allowance: Allowance, gap: Gap) -> list[int]:
    """Return the bytes that must be absent, by position in a gap and its recurrences: all leave at its start."""
    n = (gap.before - gap.after) % problem.n_steps or problem.n_steps
    need = [
        max(allowance.absent_params(_step(problem, gap.after + shift, k)) for shift in gap.shifts) for k in range(1, n)
    ]
    return list(accumulate(reversed(need), max))[::-1]


def _gap(
    problem: Problem, plans: list[TensorPlan], need: list[int], may_leave: dict[str, int], gap: Gap
) -> list[TensorPlan]:
    """Return the plans with one gap added, wherever it recurs: the tensors dropped after its first use, and returns."""
    leaving = select(may_leave, min(need[0] if need else 0, sum(may_leave.values())))
    _, back = walk(may_leave, need, leaving, lambda _: (), lambda _k, _r: may_leave)

    def stays(name: str) -> tuple[TensorGap, ...]:
        after = ((gap.after + shift, gap.before + shift) for shift in gap.shifts)
        return tuple(TensorGap(a, b % problem.n_steps, _step_of(problem, a, back, name)) for a, b in after)

    return [replace(plan, gaps=plan.gaps + stays(plan.name)) for plan in plans]


def _states(
    problem: Problem,
    group: Group,
    flow: GroupFlow,
    allowance: Allowance,
    plans: list[TensorPlan],
    spread: Spread,
    host_is_full: bool,
) -> list[TensorPlan]:
    """Return the plans with the steps in which states of device tensors go out and come in."""
    last = problem.device_update(group)
    pieces = [(t, rows) for t, p in zip(group.tensors, plans) if t.state_bytes and not p.cpu for rows in t.pieces]
    # Keys keep the order of the pieces, so that the pieces that stay are adjacent.
    sizes = {f"{i:06}": tensor.piece_bytes(rows) for i, (tensor, rows) in enumerate(pieces)}
    held = sum(sizes.values())
    steps = [_step(problem, last, k) for k in range(1, problem.n_steps)]
    need = [max(0, held - allowance.states(step)) for step in steps]
    if problem.n_passes > 2:  # no piece leaves or returns within the middle pass
        span = [
            k
            for k, step in enumerate(steps)
            if problem.in_middle((step - 1) % problem.n_steps) or problem.in_middle(step)
        ]
        need = [max(need[i] for i in span) if k in span else least for k, least in enumerate(need)]
    may_leave: Collection[str] = sizes
    if host_is_full and not spread.in_pieces:  # the host reserves a tensor's whole state for any piece that leaves
        whole = {t.name: t.state_bytes for t, p in zip(group.tensors, plans) if t.state_bytes and not p.cpu}
        chosen = select(whole, max(need, default=0))
        may_leave = [key for key, (tensor, _) in zip(sizes, pieces) if tensor.name in chosen]
    out, into = walk(
        sizes,
        envelope(need),
        frozenset(),
        lambda k: () if problem.in_middle(_step(problem, last, k - 1)) else may_leave,
        lambda k, _: () if problem.in_middle(_step(problem, last, k)) else sizes,
    )
    together = {key: key if spread.in_pieces else tensor.name for key, (tensor, _) in zip(sizes, pieces)}
    leaving: Counter[str] = Counter()
    for key, size in sizes.items():
        leaving[together[key]] += size if key in out else 0
    tiers = {name: spread.take(size, flow.state_tiers) for name, size in leaving.items() if size}
    stays: dict[str, list[StateStay]] = {plan.name: [] for plan in plans}
    for key, (tensor, rows) in zip(sizes, pieces):
        if key in out:
            gone, back = (_step(problem, last, positions[key]) for positions in (out, into))
            stays[tensor.name].append(StateStay(rows, gone, back, tiers[together[key]]))
    return [replace(plan, states=tuple(stays[plan.name])) for plan in plans]


def _waits(
    problem: Problem, group: Group, flow: GroupFlow, allowance: Allowance, plans: list[TensorPlan]
) -> list[TensorPlan]:
    """Return the plans with the steps in which gradients of device tensors leave behind a gate, and return."""
    waiting, returning = problem.waiting(group)
    if not flow.wait_out or not returning:
        return plans
    last = waiting[0]
    sizes = {t.name: t.grad_bytes for t, plan in zip(group.tensors, plans) if not plan.cpu}
    held = sum(sizes.values())
    need = [min(held, max(0, held - allowance.grads(step))) for step in waiting[1:]]
    out, back = walk(
        sizes,
        envelope(need),
        frozenset(),
        lambda _: sizes,
        lambda k, _: sizes if _step(problem, last, k) in returning else (),
    )
    return [
        replace(
            plan,
            grad_out=_step_of(problem, last, out, plan.name),
            grad_back=_step_of(problem, last, back, plan.name),
        )
        for plan in plans
    ]


def _passed_on(
    problem: Problem, group: Group, flow: GroupFlow, allowance: Allowance, plans: list[TensorPlan]
) -> list[TensorPlan]:
    """Return the plans with the steps of a pass in which totals leave, and in which they return for the next pass."""
    if not problem.sums_on_device or not flow.lead_out:
        return plans
    first = group.grad_steps[-1]
    sizes = {tensor.name: tensor.grad_bytes for tensor in group.tensors}
    held = sum(sizes.values())
    need = [
        max(0, held - min(allowance.grads(again + k) for again in problem.each(first)[:-1]))
        for k in range(1, problem.pass_steps)
    ]
    out, back = walk(sizes, envelope(need), frozenset(), lambda _: sizes, lambda _k, _: sizes)
    return [
        replace(
            plan,
            lead_out=first + out[plan.name] if plan.name in out else None,
            lead_back=first + back[plan.name] if plan.name in out else None,
        )
        for plan in plans
    ]


def _step(problem: Problem, first: int, position: int) -> int:
    return (first + position) % problem.n_steps


def _step_of(problem: Problem, first: int, positions: dict[str, int], name: str) -> int | None:
    return _step(problem, first, positions[name]) if name in positions else None
