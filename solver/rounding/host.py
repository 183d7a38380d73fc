"""The chain of steps for tensors updated on the host: gradient out, update, and back in time for the first use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from ..decisions import TensorPlan, pending_steps
from ..problem import Group, Problem
from ..solution import GroupFlow
from .knapsack import select
from .walk import Allowance, Curve, lead_window


def host_chain(
    problem: Problem, group: Group, flow: GroupFlow, plans: Sequence[TensorPlan], allowance: Allowance
) -> list[TensorPlan]:
    """Return the plans of one group with the steps of gradient copies and host updates filled in.

    Pending gradients take no more bytes than the fractions' and the spare ones. Within that limit they go out, and
    updates run, at the fractions' pace, and always in time for the tensor's return.

    Parameters
    ----------
    plans: plans whose `back` is set for the tensors updated on the host.
    allowance: device bytes that pending gradients may take.
    """
    back = {plan.name: _position(problem, group, plan.back) for plan in plans if plan.cpu}
    if not back:
        return list(plans)
    sizes = {tensor.name: tensor.grad_bytes for tensor in group.tensors if tensor.name in back}
    last = problem.last_gradient(group)
    if problem.update == "external":
        last_out = dict.fromkeys(back, problem.first_turn_around - last)
    else:
        last_out = {name: position - 2 for name, position in back.items()}
    outs = _grad_outs(problem, group, flow, plans, sizes, last_out, allowance)
    updates = {} if problem.update == "external" else _updates(problem, group, flow, sizes, outs, back)
    by_host = problem.adds_up and not problem.sums_on_device
    led = _lead_outs(problem, group, flow, sizes, allowance) if by_host else {}
    return [
        replace(
            plan,
            grad_out=(last + outs[plan.name]) % problem.n_steps,
            lead_out=group.grad_steps[-1] + led[plan.name] if led else plan.lead_out,
            cpu_update=(last + updates[plan.name]) % problem.n_steps if updates else None,
        )
        if plan.cpu
        else plan
        for plan in plans
    ]


def _position(problem: Problem, group: Group, step: int | None) -> int:
    if step is None:
        raise ValueError(f"group {group.name}: a tensor updated on the host never comes back")
    return (step - problem.last_gradient(group)) % problem.n_steps


def _grad_outs(
    problem: Problem,
    group: Group,
    flow: GroupFlow,
    plans: Sequence[TensorPlan],
    sizes: dict[str, int],
    last_out: dict[str, int],
    allowance: Allowance,
) -> dict[str, int]:
    """Return the position at which each gradient of the last pass goes out."""
    last = problem.last_gradient(group)
    waiting: Counter[int] = Counter()  # bytes of the device part's gradients, by step
    for tensor, plan in zip(group.tensors, plans):
        if not plan.cpu:
            waiting.update(dict.fromkeys(pending_steps(problem, group, plan), tensor.grad_bytes))

    def pending(k: int) -> int:
        step = (last + k + 1) % problem.n_steps
        return allowance.grads(step) - waiting[step]

    return _leaving(sizes, last_out, pending, Curve(problem, last, flow.grad_out), flow.cpu_part)


def _lead_outs(
    problem: Problem, group: Group, flow: GroupFlow, sizes: dict[str, int], allowance: Allowance
) -> dict[str, int]:
    """Return the position at which each gradient of the other passes goes out, the same in all of them."""
    first = group.grad_steps[-1]
    waiting = group.grad_bytes - sum(sizes.values())

    def pending(k: int) -> int:
        return min(map(allowance.grads, problem.each(first + k + 1)[:-1])) - waiting

    last_out = dict.fromkeys(sizes, lead_window(problem, group) - 1)
    return _leaving(sizes, last_out, pending, Curve(problem, first, flow.lead_out), flow.cpu_part)


def _leaving(
    sizes: dict[str, int], last_out: dict[str, int], allowed: Callable[[int], int], curve: Curve, cpu_part: float
) -> dict[str, int]:
    """Return the position at which each gradient goes out: if memory demands it, if due, or at the fractions' pace.

    Parameters
    ----------
    last_out: the last allowed position, by tensor. allowed: bytes that may still be on the device after a position.
    curve: the fractions that go out, `cpu_part` in total.
    """
    total = sum(sizes.values())
    pace = total / max(cpu_part, 1e-9)
    outs: dict[str, int] = {}
    for k in range(max(last_out.values()) + 1):
        rest = {name: size for name, size in sizes.items() if name not in outs}
        due = {name for name in rest if last_out[name] <= k}
        short = sum(rest.values()) - max(0, allowed(k)) - sum(rest[name] for name in due)
        left = {name: size for name, size in rest.items() if name not in due}
        going = due | select(left, min(short, sum(left.values())))
        gone = total - sum(rest.values()) + sum(rest[name] for name in going)
        for name in sorted(left.keys() - going, key=lambda n: (last_out[n], n)):
            if gone + left[name] / 2 <= pace * curve.up_to(k):
                going, gone = going | {name}, gone + left[name]
        outs.update(dict.fromkeys(sorted(going), k))
    return outs


def _updates(
    problem: Problem,
    group: Group,
    flow: GroupFlow,
    sizes: dict[str, int],
    outs: dict[str, int],
    back: dict[str, int],
) -> dict[str, int]:
    """Return the position of each update: after its gradient is out, before its values come in, most urgent first."""
    last = problem.last_gradient(group)
    curve = Curve(problem, last, flow.cpu_update)
    total = sum(sizes.values())
    pace = total / max(flow.cpu_part, 1e-9)
    done: dict[str, int] = {}
    first = (problem.first_update(group) - last) % problem.n_steps
    for k in range(first, max(back.values())):
        left = (n for n in sizes if n not in done and outs[n] < k)
        ready = sorted(left, key=lambda n: (back[n], outs[n], n))
        for name in ready:
            ahead = sum(sizes[n] for n in done) + sizes[name] / 2
            if back[name] - 1 <= k or ahead <= ceil(pace * curve.up_to(k)):
                done[name] = k
    return done
