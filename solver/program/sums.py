"""Sums of gradients over the passes of an iteration: on the host, or on the device."""

from __future__ import annotations

from ..linear import Builder, Flow, Terms, add, flow, follows
from ..problem import Group, Problem
from ..resources import Resource
from .account import Account
from .columns import WHOLE, RoundTrip
from .copies import come, leave
from .spans import Span, around, coming_steps, leaving_steps


def add_sums(
    problem: Problem, group: Group, span: Span, x: Terms, grad_out: Flow, builder: Builder, account: Account
) -> Flow:
    """Add the CPU part's gradients of all passes but the last, and the host's additions, one step after each copy.

    The first pass's gradient becomes the total, so that nothing is added then.
    """
    end = span.points[-1]
    window = around(end, problem.pass_steps + group.grad_steps[0] - 1, problem.n_steps)
    lead_out = flow(builder, f"LeadOut[{group.name}]", window, leaving_steps(problem, window), x)
    leaving = [(start + end, lead_out.later(start)) for start in problem.passes[:-1]]
    for made, gone in leaving:
        leave(group.grad_bytes, made, gone, account, copies=group.grad_copies)
        account.hold_over(gone.span[1:], group.grad_bytes, x)
        account.hold_sums(gone.span[1:], -group.grad_bytes, gone.prior)
    adder, passes = problem.rates.worker("accumulate-cpu"), problem.micro_batches
    for gone in (*(gone for _, gone in leaving[1:]), grad_out):
        for step, part in gone.each():
            account.spend(adder, (step + 1) % problem.n_steps, group.cpu_add_s, part)
    # What a middle pass leaves for the next one is added there, in every middle pass but the first.
    for step, part in leaving[0][1].each() if passes > 3 else ():
        if problem.in_middle(step + 1):
            account.spend(adder, step + 1, group.cpu_add_s * (passes - 3) / (passes - 2), part)
    return lead_out


def add_sums_on_device(
    problem: Problem,
    group: Group,
    span: Span,
    goes: tuple[Terms, RoundTrip | None],
    builder: Builder,
    account: Account,
) -> tuple[Flow, Flow]:
    """Add the total of a group from the first pass to the last: it stays between passes, or leaves and returns.

    Parameters
    ----------
    goes: the CPU part, and the device part's gradient that waits on the host for its update; both have memory there.

    Returns: the flows out and back in the first pass, which recur in every other but the last.
    """
    end, name = span.points[-1], group.name
    window = around(end, end + problem.pass_steps - 1, problem.n_steps)
    away = builder.column(f"T[{name}]")
    gone = flow(builder, f"LeadOut[{name}]", window, leaving_steps(problem, window, 2), away)
    back = flow(builder, f"LeadIn[{name}]", window, coming_steps(problem, window, 2), away)
    follows(builder, f"LeadIn after LeadOut[{name}]", back, gone)
    x, wait = goes
    more = builder.column(f"TH[{name}]")
    held = ((-1.0, x), (-1.0, wait.out.total)) if wait is not None else ((-1.0, x),)
    builder.at_most_zero(f"TH[{name}]", add((1.0, away), (-1.0, more), *held))
    account.keep(group.grad_bytes, more)
    for start in problem.passes[:-1]:
        out, into = gone.later(start), back.later(start)
        leave(group.grad_bytes, start + end, out, account, copies=group.grad_copies)
        come(group.grad_bytes, into, account, copies=group.grad_copies)
        account.hold_over(out.span[1:], group.grad_bytes, WHOLE)
        account.hold_sums(out.span[1:], -group.grad_bytes, out.prior)
        account.hold_sums(out.span[1:], group.grad_bytes, into.sums)
    for step in problem.each(end):
        additions = problem.slots_at(step) - (step == end)
        account.spend(Resource.COMPUTE, step, additions * group.device_add_s, WHOLE)
        if group.is_tied and step > end:  # the gradient that is added is there before the step
            account.hold(step, group.grad_bytes, WHOLE)
    return gone, back
