"""Optimizer states: those of the device part that leave and return, and those in files that the host updates."""

from __future__ import annotations

from ..linear import Builder, Flow, Terms, add, flow, follows
from ..problem import Group, Problem
from .account import Account
from .columns import NONE, WHOLE, RoundTrip, mark
from .copies import come, leave
from .spans import Span, around, coming_steps, leaving_steps


def add_states(
    problem: Problem, group: Group, updated: int, x: Terms, builder: Builder, account: Account
) -> tuple[RoundTrip, ...]:
    """Add the device part's optimizer states: they leave after the update and return before the next, on any tier."""
    if not group.state_bytes:
        return ()
    cycle = around(updated, updated - 1, problem.n_steps)
    may = tuple(step for step in cycle if not problem.in_middle(step))
    rest = add((1.0, WHOLE), (-1.0, x))
    account.hold_over(cycle, group.state_bytes, rest)
    trips: list[RoundTrip] = []
    for tier in problem.state_tiers:
        name = f"{group.name}{mark(tier.path)}"
        total = builder.column(f"S[{name}]")
        gone = flow(builder, f"OutO[{name}]", cycle, leaving_steps(problem, may, 2), total)
        back = flow(builder, f"InO[{name}]", cycle, coming_steps(problem, may, 2), total)
        follows(builder, f"InO after OutO[{name}]", back, gone)
        account.keep(group.state_bytes, total, tier.name)
        leave(group.state_bytes, updated, gone, account, tier.path.out, copies=group.state_copies)
        come(group.state_bytes, back, account, tier.path.into, copies=group.state_copies)
        account.hold_sums(cycle[1:], -group.state_bytes, gone.prior)
        account.hold_sums(cycle[1:], group.state_bytes, back.sums)
        trips.append(RoundTrip(tier.name, gone, back))
    totals = ((1.0, trip.out.total) for trip in trips)
    builder.at_most_zero(f"states[{group.name}]", add(*totals, (-1.0, rest)))
    return tuple(trips)


def add_stored_part(problem: Problem, group: Group, x: Terms, builder: Builder, account: Account) -> Terms:
    """Add the column of the CPU part whose states lie in files; nothing if none may."""
    if not problem.may_update_from_files(group) or not x:
        return NONE
    stored = builder.column(f"y[{group.name}]")
    builder.at_most_zero(f"y[{group.name}]", add((1.0, stored), (-1.0, x)))
    builder.at_most_zero(f"ring[{group.name}]", add((1.0, stored), (-1.0, account.ring)))
    return stored


def add_updates_from_files(
    problem: Problem,
    group: Group,
    span: Span,
    steps: tuple[int, ...],
    stored: Terms,
    builder: Builder,
    account: Account,
) -> Flow:
    """Add the updates on the host whose states are read from files and written back, in the same step.

    Those before the gate write to a second place there, which the tier has for good.
    """
    tier = problem.host_update_tier
    assert tier is not None
    passing_bytes = group.state_bytes + group.param_bytes * problem.values_beside_states
    update = flow(builder, f"OptF[{group.name}]", span.idle, steps, stored)
    count_updates(problem, group, update, group.param_log_s, account)
    for step, part in update.each():
        for link in tier.path.links:
            account.move(link, step, passing_bytes, part, copies=group.state_copies, ends_on_host=True)
    account.keep(-group.state_bytes, stored)
    account.keep(passing_bytes, stored, tier.name)
    if problem.speculates:
        count_log(problem, group.param_bytes, span.idle, update, account)
        account.keep(group.state_bytes, update.before(problem.first_turn_around), tier.name)
    return update


def count_updates(problem: Problem, group: Group, update: Flow, log_s: float, account: Account) -> None:
    updater = problem.rates.worker("update-cpu")
    for step, part in update.each():
        logging_s = log_s if problem.is_logged(group, step) else 0.0
        account.spend(updater, step, group.cpu_update_s + logging_s, part)


def count_log(problem: Problem, size_bytes: int, idle: tuple[int, ...], update: Flow, account: Account) -> None:
    """Count the log of what is updated before the gate, until it has opened."""
    opens = problem.first_turn_around
    logged = {step: update.sums[step] for step in idle[: idle.index(opens)]} | {opens: update.before(opens)}
    if account.host_in_time:
        account.stay_sums(tuple(logged), size_bytes, logged)
    else:
        account.keep(size_bytes, update.before(opens))
