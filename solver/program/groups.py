"""Columns and rows of one parameter group; the symbols are those of the legend in model.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..linear import ONE, Builder, Flow, Terms, add, flow, follows
from ..problem import Group, Problem
from ..resources import HOST, Path, Resource
from .account import Account
from .spans import Span, Stay, around, coming_steps, leaving_steps, span_of, updating_steps

WHOLE: Terms = {ONE: 1.0}
NONE: Terms = {}


@dataclass(frozen=True)
class Away:
    """The decision about a gap: `part` is dropped at the end of step `after`, and back from a tier before `before`."""

    stay: Stay
    part: Terms
    back: Flow
    path: Path


@dataclass(frozen=True)
class RoundTrip:
    """A part that leaves to a tier and returns unchanged: its flows out and back, with the same total."""

    tier: str
    out: Flow
    back: Flow


@dataclass(frozen=True)
class Source:
    """A tier that a part of a group can come from after it was dropped, by its path.

    Parameters
    ----------
    of_device: of a trainable group, as much of the device part; no other returns after the last read.
    """

    path: Path
    part: Terms
    of_device: Terms | None = None


@dataclass(frozen=True)
class Departure:
    """The device part's new values on their way to a tier.

    Parameters
    ----------
    drop, keep: the flows of what is released there once it has left, and of what stays on the device as well.
    back: what was released returns.
    """

    path: Path
    drop: Flow
    keep: Flow
    back: Flow

    @property
    def part(self) -> Terms:
        """The part of the group of which the tier has the values."""
        return add((1.0, self.drop.total), (1.0, self.keep.total))


@dataclass(frozen=True)
class GroupColumns:
    """The expressions of one group; a flow is None where the group has none."""

    cpu_part: Terms
    grad_out: Flow | None = None
    lead_out: Flow | None = None
    lead_back: Flow | None = None
    cpu_update: Flow | None = None
    cpu_back: Flow | None = None
    departures: tuple[Departure, ...] = ()
    wait: RoundTrip | None = None
    states: tuple[RoundTrip, ...] = ()
    away: tuple[Away, ...] = ()
    sources: tuple[Source, ...] = ()
    from_files: Terms = field(default_factory=dict)


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
    hosted = builder.column(f"h[{group.name}]")
    account.keep(group.param_bytes, hosted)
    gaps = (*span.between, Stay(span.end, span.first))
    sources = [Source(problem.rates.host, hosted)]
    for tier in problem.sources(group):  # each whole tensor has one source, so that a group's parts do not overlap
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
    _count_cpu_part(problem, group, span, WHOLE, grad_out, back, account)
    account.keep(group.grad_bytes, WHOLE)  # until the user's code lets go of it
    account.keep(group.param_bytes, WHOLE)
    away = _others(problem, group, span.between, [Source(problem.rates.host, WHOLE, NONE)], builder, account)
    return GroupColumns(WHOLE, grad_out=grad_out, cpu_back=back, away=away)


def _planned(problem: Problem, group: Group, span: Span, builder: Builder, account: Account) -> GroupColumns:
    """Add a group with a CPU part and a device part, each with its own flows."""
    name, idle = group.name, span.idle
    first_update, updated = problem.first_update(group), problem.device_update(group)
    before_use = around(first_update, span.first - 1, problem.n_steps)
    x = builder.column(f"x[{name}]") if group.side == "any" else WHOLE if group.side == "host" else NONE
    grad_out = flow(builder, f"GradOut[{name}]", idle, leaving_steps(problem, idle, 2), x)
    stored = _stored_part(problem, group, x, builder, account)
    in_ram = add((1.0, x), (-1.0, stored)) if stored else x
    steps = updating_steps(problem, group, before_use[:-1])
    in_place = update = flow(builder, f"Opt[{name}]", idle, steps, in_ram)
    if stored:
        update = in_place.plus(_from_files(problem, group, span, steps, stored, builder, account))
    returns = before_use[before_use.index(problem.first_return(group)) :]
    cpu_back = flow(builder, f"ParInC[{name}]", idle, coming_steps(problem, returns), x)
    follows(builder, f"Opt after GradOut[{name}]", update, grad_out)
    follows(builder, f"ParInC after Opt[{name}]", cpu_back, update)
    _count_updates(problem, group, in_place, group.cpu_log_s, account)
    _count_cpu_part(problem, group, span, x, grad_out, cpu_back, account)
    lead_out = lead_back = None
    if problem.adds_up and not problem.sums_on_device:
        lead_out = _sums(problem, group, span, x, grad_out, builder, account)
    if problem.adds_up:  # the total is there from the first pass on
        account.keep(group.grad_bytes, x)
    elif problem.speculates:  # a gradient is needed again if its update is undone
        account.remain(idle, group.grad_bytes, grad_out)
        account.leave_host(idle[idle.index(problem.first_turn_around) + 1 :], group.grad_bytes, update)
    else:
        account.pass_through(group.grad_bytes, grad_out, update)
    if problem.speculates:
        _log(problem, group.log_bytes, idle, in_place, account)

    after_update = around(updated, span.first - 1, problem.n_steps)
    paths = (problem.rates.host, *(tier.path for tier in problem.parameter_tiers))
    departures = tuple(_departure(problem, group, path, after_update, builder) for path in paths)
    to_host, *others = departures
    hosted = add((1.0, x), (1.0, to_host.part))
    copies = ((1.0, one.part) for one in others)  # each whole tensor has one place off the device
    builder.at_most_zero(f"host copy[{name}]", add((1.0, hosted), *copies, (-1.0, WHOLE)))
    account.keep(group.param_bytes, hosted)
    rest = add((1.0, WHOLE), (-1.0, x))
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
        lead_out, lead_back = _sums_on_device(problem, group, span, (x, wait), builder, account)
    states = _states(problem, group, updated, x, builder, account)
    sources = [Source(one.path, one.part if one is not to_host else hosted, one.part) for one in departures]
    away = _others(problem, group, span.between, sources, builder, account)
    several = tuple(sources) if others else ()
    return GroupColumns(
        x, grad_out, lead_out, lead_back, update, cpu_back, departures, wait, states, away, several, stored
    )  # fmt: skip


def _stored_part(problem: Problem, group: Group, x: Terms, builder: Builder, account: Account) -> Terms:
    """Add the column of the CPU part whose states lie in files; nothing if none may."""
    if not problem.may_update_from_files(group) or not x:
        return NONE
    stored = builder.column(f"y[{group.name}]")
    builder.at_most_zero(f"y[{group.name}]", add((1.0, stored), (-1.0, x)))
    builder.at_most_zero(f"ring[{group.name}]", add((1.0, stored), (-1.0, account.ring)))
    return stored


def _from_files(
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
    update = flow(builder, f"OptF[{group.name}]", span.idle, steps, stored)
    _count_updates(problem, group, update, group.param_log_s, account)
    for step, part in update.each():
        for link in tier.path.links:
            account.move(link, step, group.state_bytes, part, copies=group.state_copies, ends_on_host=True)
    account.keep(-group.state_bytes, stored)
    account.keep(group.state_bytes, stored, tier.name)
    if problem.speculates:
        _log(problem, group.param_bytes, span.idle, update, account)
        account.keep(group.state_bytes, update.before(problem.first_turn_around), tier.name)
    return update


def _count_updates(problem: Problem, group: Group, update: Flow, log_s: float, account: Account) -> None:
    updater = problem.rates.worker("update-cpu")
    for step, part in update.each():
        logging_s = log_s if problem.is_logged(group, step) else 0.0
        account.spend(updater, step, group.cpu_update_s + logging_s, part)


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
    _come(group.param_bytes, gone.back, account, gone.path.into, copies=group.param_copies)
    account.hold_sums(after_update[1:], -group.param_bytes, gone.drop.prior)
    account.hold_sums(after_update[1:], group.param_bytes, gone.back.sums)


def _count_cpu_part(
    problem: Problem, group: Group, span: Span, x: Terms, grad_out: Flow, cpu_back: Flow, account: Account
) -> None:
    """Count the CPU part: its gradient until it is out, its new parameters once in, its copies and host bytes."""
    leave(group.grad_bytes, span.end, grad_out, account, copies=group.grad_copies)
    _come(group.param_bytes, cpu_back, account, copies=group.param_copies)
    account.hold_over(span.idle[1:], group.grad_bytes, x)
    account.hold_sums(span.idle[1:], -group.grad_bytes, grad_out.prior)
    account.hold_sums(span.idle[1:], group.param_bytes, cpu_back.sums)
    account.keep(group.state_bytes, x)
    # What the host updates is away from its last use on; elsewhere all steps up to the last gradient count the whole.
    unread = range(problem.last_read(group) + 1, problem.last_gradient(group) + 1)
    account.hold_over(unread, group.param_bytes, add((-1.0, x)))


def _sums(
    problem: Problem, group: Group, span: Span, x: Terms, grad_out: Flow, builder: Builder, account: Account
) -> Flow:
    """Add the CPU part's gradients of all passes but the last, and the host's additions, one step after each copy."""
    end = span.points[-1]
    window = around(end, problem.pass_steps + group.grad_steps[0] - 1, problem.n_steps)
    lead_out = flow(builder, f"LeadOut[{group.name}]", window, leaving_steps(problem, window), x)
    leaving = [(start + end, lead_out.later(start)) for start in problem.passes[:-1]]
    for made, gone in leaving:
        leave(group.grad_bytes, made, gone, account, copies=group.grad_copies)
        account.hold_over(gone.span[1:], group.grad_bytes, x)
        account.hold_sums(gone.span[1:], -group.grad_bytes, gone.prior)
    adder = problem.rates.worker("accumulate-cpu")
    for gone in (*(gone for _, gone in leaving), grad_out):
        for step, part in gone.each():
            account.spend(adder, (step + 1) % problem.n_steps, group.cpu_add_s, part)
    return lead_out


def _sums_on_device(
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
        _come(group.grad_bytes, into, account, copies=group.grad_copies)
        account.hold_over(out.span[1:], group.grad_bytes, WHOLE)
        account.hold_sums(out.span[1:], -group.grad_bytes, out.prior)
        account.hold_sums(out.span[1:], group.grad_bytes, into.sums)
    for step in problem.each(end):
        additions = problem.slots_at(step) - (step == end)
        account.spend(Resource.COMPUTE, step, additions * group.device_add_s, WHOLE)
        if group.is_tied and step > end:  # the gradient that is added is there before the step
            account.hold(step, group.grad_bytes, WHOLE)
    return gone, back


def _log(problem: Problem, size_bytes: int, idle: tuple[int, ...], update: Flow, account: Account) -> None:
    """Count the log of what is updated before the gate, until it has opened."""
    opens = problem.first_turn_around
    logged = {step: update.sums[step] for step in idle[: idle.index(opens)]} | {opens: update.before(opens)}
    if account.host_in_time:
        account.stay_sums(tuple(logged), size_bytes, logged)
    else:
        account.keep(size_bytes, update.before(opens))


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
    _come(group.grad_bytes, back, account, copies=group.grad_copies)
    account.hold_sums(waiting[1:], -group.grad_bytes, gone.prior)
    account.hold_sums(waiting[1:], group.grad_bytes, back.sums)
    return RoundTrip(HOST, gone, back)


def _states(
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
        _come(group.state_bytes, back, account, tier.path.into, copies=group.state_copies)
        account.hold_sums(cycle[1:], -group.state_bytes, gone.prior)
        account.hold_sums(cycle[1:], group.state_bytes, back.sums)
        trips.append(RoundTrip(tier.name, gone, back))
    totals = ((1.0, trip.out.total) for trip in trips)
    builder.at_most_zero(f"states[{group.name}]", add(*totals, (-1.0, rest)))
    return tuple(trips)


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
                _come(group.param_bytes, again, account, source.path.into, copies=group.param_copies)
                account.hold_sums(again.span, group.param_bytes, again.sums)
        result += ways
    return tuple(result)


def leave(
    amount_bytes: float,
    made: int,
    gone: Flow,
    account: Account,
    link: Resource = Resource.OUT,
    *,
    copies: int = 1,
    last: float = 1.0,
) -> None:
    """Count the copies of a flow out of values that step `made` makes; in that step they follow its compute.

    Parameters
    ----------
    last: the part that its last compute makes, if the values of several micro-batches leave.
    """
    for step, part in gone.each():
        account.move(link, step, amount_bytes, part, copies=copies, serial=last if step == made else 0.0)


def _come(amount_bytes: float, back: Flow, account: Account, link: Resource = Resource.IN, *, copies: int) -> None:
    for step, part in back.each():
        account.move(link, step, amount_bytes, part, copies=copies)


def mark(path: Path) -> str:
    """Return the suffix of columns and rows that belong to a path other than the host's."""
    return "" if path.tier == HOST else f"@{path.tier}"
