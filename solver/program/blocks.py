"""Columns and rows of the chain: the option of each block, and what it offloads.

All passes are decided alike: each column counts in every pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..fat_steps import all_but_one
from ..linear import ONE, Builder, Terms, add, flow
from ..problem import Problem, ProblemError
from ..resources import Resource
from .account import Account
from .columns import RoundTrip, mark
from .copies import leave

STEPS = 3  # extra steps in which offloaded values may still leave, and in which they may already return


@dataclass(frozen=True)
class Choices:
    """The option of one block (Comp), and the round trips of the values that the option offloads.

    Parameters
    ----------
    columns: by option index, a binary column.
    trips: by tier, the flows that leave and return in the first pass, as fractions of the most bytes that any option
        offloads; empty if no option offloads.
    """

    columns: dict[int, Terms]
    trips: tuple[RoundTrip, ...] = ()


def add_blocks(problem: Problem, builder: Builder, account: Account) -> tuple[Choices, ...]:
    """Add exactly one option per block; the caller counts the peaks."""
    return tuple(_add_block(problem, i, builder, account) for i in range(problem.n_blocks))


def _add_block(problem: Problem, i: int, builder: Builder, account: Account) -> Choices:
    block = problem.blocks[i]
    columns: dict[int, Terms] = {}
    for o, option in enumerate(block.options):
        if option.offloaded_bytes and not offload_steps(problem, i):
            continue
        columns[o] = column = builder.column(f"Comp[{i},{o}]", integer=True)
        if not account.host_in_time:
            account.keep(option.offloaded_bytes, column)
        for forward, backward in problem.runs[i]:
            share = problem.share(forward)
            account.spend(Resource.COMPUTE, forward, share * option.forward_s, column)
            account.spend(Resource.COMPUTE, backward, share * option.backward_s, column)
            account.hold_over(range(forward + 1, backward), option.saved_bytes, column)
    if not columns:
        raise ProblemError(f"block {block.name}: every option offloads, but its backward follows its forward")
    one = add(*((1.0, c) for c in columns.values()), (-1.0, {ONE: 1.0}))
    builder.at_most_zero(f"one option[{i}]", one, equal=True)
    most = max(block.options[o].offloaded_bytes for o in columns)
    if not most:
        return Choices(columns)
    total = add(*((block.options[o].offloaded_bytes / most, column) for o, column in columns.items()))
    return Choices(columns, _offload(problem, i, most, total, builder, account))


def offload_steps(problem: Problem, i: int) -> int:
    """Return the number of extra steps in which a block's offloaded values may leave, or return; 0 if none can."""
    forward, backward = problem.runs[i][0]
    return min(STEPS, (backward - forward - 1) // 2)


def _offload(
    problem: Problem, i: int, most_bytes: int, total: Terms, builder: Builder, account: Account
) -> tuple[RoundTrip, ...]:
    """Add the flows of a block's offloaded values: held until they leave, and back when its backward starts."""
    (first, last), more = problem.runs[i][0], offload_steps(problem, i)
    leaves, comes = tuple(range(first, first + more + 1)), tuple(range(last - more, last + 1))
    host, *others = problem.roaming_tiers
    parts = {tier.name: builder.column(f"Act[{i}{mark(tier.path)}]") for tier in others}
    to_host = add((1.0, total), *((-1.0, part) for part in parts.values()))
    if parts:
        builder.at_most_zero(f"Act[{i}]", add((-1.0, to_host)))
    trips = []
    for tier, part in zip(problem.roaming_tiers, (to_host, *parts.values())):
        name = f"{i}{mark(tier.path)}"
        out = flow(builder, f"ActOut[{name}]", leaves, leaves, part)
        back = flow(builder, f"ActIn[{name}]", comes, comes, part)
        if tier != host:
            account.keep(most_bytes, part, tier.name)
            if not account.host_in_time:
                account.keep(-most_bytes, part)
        trips.append(RoundTrip(tier.name, out, back))
        for forward, backward in problem.runs[i]:
            gone, there = out.later(forward - first), back.later(backward - last)
            if tier == host and account.host_in_time:
                account.pass_through(most_bytes, gone, there)
            slots, moved_bytes = problem.slots_at(forward), problem.share(forward) * most_bytes
            leave(moved_bytes, forward, gone, account, tier.path.out, copies=slots, last=1 / slots)
            for step, moved in there.each():
                serial = 1 / slots if step == backward else 0.0
                account.move(tier.path.into, step, moved_bytes, moved, copies=slots, serial=serial)
            account.hold_over(gone.span[1:], most_bytes, part)
            account.hold_sums(gone.span[1:], -most_bytes, gone.prior)
            account.hold_sums(there.span[:-1], most_bytes, there.sums)
            for step, moved in gone.each():
                account.go_in_turn(step, all_but_one(problem, most_bytes), moved)
            for step, moved in there.each():
                rest_bytes, one_bytes = all_but_one(problem, most_bytes), most_bytes // problem.per_step
                if step == backward and rest_bytes:  # those of the next micro-batch come while one computes
                    rest_bytes -= one_bytes
                    account.go_in_turn(step, -one_bytes, moved)
                account.come_in_turn(step, rest_bytes, moved)
    return tuple(trips)
