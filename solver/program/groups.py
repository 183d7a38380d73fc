"""Columns and rows of one parameter group; the symbols are those of the legend in model.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..linear import Builder, Flow, Terms, add, flow, follows
from ..problem import Group, Problem
from ..resources import HOST, Path, Resource
from .account import Account
from .casts import add_cast_part
from .columns import NONE, WHOLE, Away, Departure, GroupColumns, RoundTrip, Source, mark
from .copies import come, leave
from .spans import Span, Stay, around, coming_steps, leaving_steps, span_of, updating_steps
from .states import add_states, add_stored_part, add_updates_from_files, count_log, count_updates
from .sums import add_sums, add_sums_on_device


def add_group(problem: Problem, group: Group, builder: Builder, account: Account) -> GroupColumns:
    """Add the columns and rows of `group`, and count them in `account`."""
    span = span_of(problem, group)
    for begins in problem.each(0):
        for step in span.points:
            account.hold(begins + step, group.param_bytes, WHOLE)
    if not group.trainable:
        return _frozen(problem, group, span, builder, account)
    if problem.update == "external":
        return _external(problem, group, span, builder, account)
    return _planned(problem, group, span, builder, account)


def _frozen(problem: Problem, group: Group, span: Span, builder: Builder, account: Account) -> GroupColumns:
    tiers = problem.sources(group)
    hosted = builder.column(f"h[{group.name}]")
    account.keep(group.param_bytes, hosted if tiers else WHOLE)  # what stays on the device is in RAM as well
    gaps = (*span.between, Stay(span.end, span.first))
    sources = [Source(problem.rates.host, hosted)]
    for tier in tiers:  # each whole tensor has one source, so that a group's parts do not overlap
        sources.append(Source(tier.path, builder.column(f"h[{group.name}{mark(tier.path)}]")))
    if len(sources) > 1:
        parts = ((1.0, source.part) for source in sources)
        builder.at_most_zero(f"sources[{group.name}]", add(*parts, (-1.0, WHOLE)))
    return GroupColumns(NONE, sources=tuple(sources), away=_others(problem, group, gaps, sources, builder, account))


def _external(problem: Problem, group: Group, span: Span, builder: Builder, account: Account) -> GroupColumns:
    """Add a group that the user's code updates as a whole, between the first turn-around step and the second."""
    name, barrier = group.name, problem.first_turn_around
    leaves = leaving_steps(problem, around(span.end, barrier, problem.n_steps))
    comes = coming_steps(problem, span.idle[span.idle.index(barrier) + 1 :])
    grad_out = flow(builder, f"GradOut[{name}]", span.idle, leaves, WHOLE)
    back = flow(builder, f"ParInC[{name}]", span.idle, comes, WHOLE)
    come(group.param_bytes, back, account, copies=group.param_copies)
    _count_cpu_part(problem, group, span, WHOLE, grad_out, back, account)
    account.keep(group.grad_bytes, WHOLE)  # until the user's code lets go of it
    account.keep(group.param_bytes, WHOLE)
    away = _others(problem, group, span.between, [Source(problem.rates.host, WHOLE, NONE)], builder, account)
    return GroupColumns(WHOLE, grad_out=grad_out, cpu_back=back, away=away)


def _planned(problem: Problem, group: Group, span: Span, builder: Builder, account: Account) -> GroupColumns:
    """Add a group with a CPU part and a device part, each with its own flows."""
    name, idle = group.name, span.idle
    updated = problem.device_update(group)
    x = builder.column(f"x[{name}]") if group.side == "any" else WHOLE if group.side == "host" else NONE
    grad_out = flow(builder, f"GradOut[{name}]", idle, leaving_steps(problem, idle, 2), x)
    by_host = _host_updates(problem, group, span, x, grad_out, builder, account)
    update, cpu_back, stored = by_host.updates, by_host.back, by_host.stored
    _count_cpu_part(problem, group, span, x, grad_out, cpu_back, account)
    lead_out = lead_back = None
    if problem.adds_up and not problem.sums_on_device:
        lead_out = add_sums(problem, group, span, x, grad_out, builder, account)
    if problem.adds_up:  # the total is there from the first pass on
        account.keep(group.grad_bytes, x)
    elif problem.speculates:  # a gradient is needed again if its update is undone
        account.remain(idle, group.grad_bytes, grad_out)
        account.leave_host(idle[idle.index(problem.first_turn_around) + 1 :], group.grad_bytes, update)
    else:
        account.pass_through(group.grad_bytes, grad_out, update)
    if problem.speculates:
        count_log(problem, group.log_bytes, idle, by_host.in_place, account)

    after_update = around(updated, span.first - 1, problem.n_steps)
    paths = (problem.rates.host, *(tier.path for tier in problem.parameter_tiers))
    departures = tuple(_departure(problem, group, path, after_update, builder) for path in paths)
    to_host, *others = departures
    from_host = add((1.0, by_host.in_ram), (1.0, to_host.part))
    copies = ((1.0, one.part) for one in others)  # each whole tensor has one place off the device
    builder.at_most_zero(f"host copy[{name}]", add((1.0, x), (1.0, to_host.part), *copies, (-1.0, WHOLE)))
    rest = add((1.0, WHOLE), (-1.0, x))
    # What is always on the device has its home in files, too, where parameters can be there at all.
    account.keep(group.param_bytes, from_host if others else WHOLE)
    if others:
        away = ((-1.0, one.part) for one in departures)
        account.keep(group.param_bytes, add((1.0, rest), *away), others[0].path.tier)
    account.spend(Resource.COMPUTE, span.end, group.norm_s, WHOLE)
    account.spend(Resource.COMPUTE, updated, group.device_update_s, rest)
    account.hold_over(idle[1:], group.param_bytes, rest)
    for one in departures:
        _count_departure(group, updated, after_update, one, account)
    for one in others:
        account.keep(group.param_bytes, one.part, one.path.tier)
    for step in problem.each(span.points[-1])[1:] if not problem.sums_on_device else ():
        account.spend(Resource.COMPUTE, step, group.device_add_s, rest)

    wait = _wait(problem, group, span, rest, builder, account)
    if problem.sums_on_device:
        lead_out, lead_back = add_sums_on_device(problem, group, span, (x, wait), builder, account)
    states = add_states(problem, group, updated, x, builder, account)
    sources = [Source(to_host.path, from_host, to_host.part)]
    sources += [Source(o.path, add((1.0, by_host.on(o.path.tier)), (1.0, o.part)), o.part) for o in others]
    gaps = _others(problem, group, span.between, sources, builder, account)
    several = tuple(sources) if others else ()
    cast = add_cast_part(problem, group, span, by_host.in_place.total, builder, account)
    return GroupColumns(
        x, grad_out, lead_out, lead_back, update, cpu_back, departures, wait, states, gaps, several, stored, cast
    )  # fmt: skip


@dataclass(frozen=True)
class _ByHost:
    """The updates of the CPU part.

    Parameters
    ----------
    stored: the part whose states lie in files. in_ram: the part whose values are in RAM, or cast there. beside: the
        tier that has the values of the others, None if there are none.
    in_place: the updates of states in RAM. updates: all of them. back: the new values that come in, from either place.
    """

    stored: Terms
    in_ram: Terms
    beside: str | None
    in_place: Flow
    updates: Flow
    back: Flow

    def on(self, tier: str) -> Terms:
        """Return the part whose values a tier beside the host has."""
        return self.stored if tier == self.beside else NONE


def _host_updates(
    problem: Problem, group: Group, span: Span, x: Terms, grad_out: Flow, builder: Builder, account: Account
) -> _ByHost:
    """Add the updates on the host, and the new values that come in after them, from RAM or from files."""
    name, idle, tier = group.name, span.idle, problem.host_update_tier
    before_use = around(problem.first_update(group), span.first - 1, problem.n_steps)
    steps = updating_steps(problem, group, before_use[:-1])
    returns = coming_steps(problem, before_use[before_use.index(problem.first_return(group)) :])
    stored = add_stored_part(problem, group, x, builder, account)
    rest = add((1.0, x), (-1.0, stored)) if stored else x
    in_place = updates = flow(builder, f"Opt[{name}]", idle, steps, rest)
    count_updates(problem, group, in_place, group.cpu_log_s, account)
    beside = tier if stored and problem.values_beside_states else None
    in_ram = rest if beside else x
    back = flow(builder, f"ParInC[{name}]", idle, returns, in_ram)
    come(group.param_bytes, back, account, copies=group.param_copies)
    from_files = None
    if stored:
        from_files = add_updates_from_files(problem, group, span, steps, stored, builder, account)
        updates = in_place.plus(from_files)
    follows(builder, f"Opt after GradOut[{name}]", updates, grad_out)
    follows(builder, f"ParInC after Opt[{name}]", back, in_place if beside else updates)
    if beside is not None and from_files is not None:
        read = flow(builder, f"ParInF[{name}]", idle, returns, stored)
        follows(builder, f"ParInF after OptF[{name}]", read, from_files)
        come(group.param_bytes, read, account, beside.path.into, copies=group.param_copies)
        back = back.plus(read)
    return _ByHost(stored, in_ram, beside.name if beside else None, in_place, updates, back)


def _departure(
    problem: Problem, group: Group, path: Path, after_update: tuple[int, ...], builder: Builder
) -> Departure:
    """Add the device part's new values that leave to a tier, and return before the group is read."""
    name = f"{group.name}{mark(path)}"
    dropped, kept = builder.column(f"D[{name}]"), builder.column(f"K[{name}]")
    drop = flow(builder, f"Drop[{name}]", after_update, leaving_steps(problem, after_update, 2), dropped)
    keep = flow(builder, f"Keep[{name}]", after_update, leaving_steps(problem, after_update), kept)
    back = flow(builder, f"ParIn[{name}]", after_update, coming_steps(problem, after_update, 2), dropped)
    follows(builder, f"ParIn after Drop[{name}]", back, drop)
    return Departure(path, drop, keep, back)


def _count_departure(
    group: Group, updated: int, after_update: tuple[int, ...], gone: Departure, account: Account
) -> None:
    for one in (gone.drop, gone.keep):
        leave(group.param_bytes, updated, one, account, gone.path.out, copies=group.param_copies)
    come(group.param_bytes, gone.back, account, gone.path.into, copies=group.param_copies)
    account.hold_sums(after_update[1:], -group.param_bytes, gone.drop.prior)
    account.hold_sums(after_update[1:], group.param_bytes, gone.back.sums)


def _count_cpu_part(
    problem: Problem, group: Group, span: Span, x: Terms, grad_out: Flow, cpu_back: Flow, account: Account
) -> None:
    """Count the CPU part: its gradient until it is out, its new parameters once in, its copies and host bytes."""
    leave(group.grad_bytes, span.end, grad_out, account, copies=group.grad_copies)
    account.hold_over(span.idle[1:], group.grad_bytes, x)
    account.hold_sums(span.idle[1:], -group.grad_bytes, grad_out.prior)
    account.hold_sums(span.idle[1:], group.param_bytes, cpu_back.sums)
    account.keep(group.state_bytes, x)
    # What the host updates is away from its last use on; elsewhere all steps up to the last gradient count the whole.
    unread = range(problem.last_read(group) + 1, problem.last_gradient(group) + 1)
    account.hold_over(unread, group.param_bytes, add((-1.0, x)))


def _wait(
    problem: Problem, group: Group, span: Span, rest: Terms, builder: Builder, account: Account
) -> RoundTrip | None:
    """Add the device part's whole gradient, which stays until its update or, behind a gate, leaves and returns."""
    updated = problem.device_update(group)
    # With several micro-batches the first one's gradient becomes the total.
    since = span.end if problem.sums_on_device else span.points[-1]
    account.hold_over(around(since, updated, problem.n_steps)[1:], group.grad_bytes, rest)
    waiting, returning = problem.waiting(group)
    if not returning or not rest:
        return None
    total = builder.column(f"G[{group.name}]")
    builder.at_most_zero(f"G[{group.name}]", add((1.0, total), (-1.0, rest)))
    gone = flow(builder, f"GradOutD[{group.name}]", waiting, leaving_steps(problem, waiting, 2), total)
    back = flow(builder, f"GradInD[{group.name}]", waiting, coming_steps(problem, returning), total)
    follows(builder, f"GradInD after GradOutD[{group.name}]", back, gone)
    if problem.adds_up:
        account.keep(group.grad_bytes, total)
    else:  # a failure may need the host's copy until the update
        account.remain((*waiting, updated), group.grad_bytes, gone)
    leave(group.grad_bytes, span.end, gone, account, copies=group.grad_copies)
    come(group.grad_bytes, back, account, copies=group.grad_copies)
    account.hold_sums(waiting[1:], -group.grad_bytes, gone.prior)
    account.hold_sums(waiting[1:], group.grad_bytes, back.sums)
    return RoundTrip(HOST, gone, back)


def _others(
    problem: Problem,
    group: Group,
    gaps: tuple[Stay, ...],
    sources: Sequence[Source],
    builder: Builder,
    account: Account,
) -> tuple[Away, ...]:
    """Add every gap but a trainable group's idle one: the part with a copy elsewhere may be dropped, and returns."""
    result: list[Away] = []
    for stay in gaps:
        between = around(stay.after, stay.before - 1, problem.n_steps)[1:]
        if len(between) < 2:  # a dropped part would return in the same step
            for shift in stay.shifts:
                account.hold_over([step + shift for step in between], group.param_bytes, WHOLE)
            continue
        ways = []
        for source in sources:
            unread = source.of_device is not None and stay.after == problem.last_read(group)
            may_leave = source.of_device if unread and source.of_device is not None else source.part
            label = f"{group.name}{mark(source.path)},{stay.after}"
            part = builder.column(f"d[{label}]")
            builder.at_most_zero(f"d[{label}]", add((1.0, part), (-1.0, may_leave)))
            back = flow(builder, f"Back[{label}]", between, coming_steps(problem, between, 1), part)
            ways.append(Away(stay, part, back, source.path))
        dropped = [(-1.0, way.part) for way in ways]
        for shift in stay.shifts:
            account.hold_over([step + shift for step in between], group.param_bytes, add((1.0, WHOLE), *dropped))
            for way, source in zip(ways, sources):
                again = way.back.later(shift)
                come(group.param_bytes, again, account, source.path.into, copies=group.param_copies)
                account.hold_sums(again.span, group.param_bytes, again.sums)
        result += ways
    return tuple(result)
