"""The integer program: where everything lives, when it moves, where updates run, and what is recomputed.

OffMate (section 4.1), restated. Steps t are cyclic. Flows are fractions of a group w, stored as cumulative sums (see
Flow): `Flow.upto(t)` has moved by the end of step t, `Flow.before(t)` by its beginning.

| symbol | name in the code | meaning | range, unit | rule |
| --- | --- | --- | --- | --- |
| p, r, q | param_, grad_, state_bytes | compute copy, gradient, optimizer state | bytes | |
| f, g | Span.first, Span.end | first use, step of the last gradient | step | idle gap: g .. f - 1 |
| x | cpu_part | part updated on the host; the rest on the device, in step u | [0, 1]; 1 or 0 by side | |
| u | updated | step of the device's update; g without a gate | step | device part: flows begin at u, not g |
| GradOut | grad_out | CPU part's gradient of the last pass leaves | idle gap | sum = x |
| | lead_out | the same in all other passes | after g | sum = x, left before the next pass makes it again |
| LeadIn | lead_back | total returns, if the device adds up | before next g | upto(t) <= LeadOut.before(t), sum = T |
| GradOutD, GradInD | wait | device part's gradient waits on the host | g .. u - 1 | sums <= 1 - x, back from 2L on |
| Opt | cpu_update | CPU part is updated | after g; behind a gate from 2L on | upto(t) <= GradOut.before(t), sum = x |
| OptF, y | from_files | part of Opt, of x: states from files, read and written in its step | as Opt | sum = y <= x |
| Ring | ring | what passes the host's memory from files and back has room there | [0, 1] | y <= Ring |
| c | cast | part of x, of x - y: the host has its float32 copies alone | [0, 1] | c <= x - y, all casts in all Time |
| Casts | casts | what is cast has room on its way | [0, 1] | c <= Casts |
| ParInC | cpu_back | CPU part's new parameters come in | after g | upto(t) <= Opt.before(t), sum = x |
| ParInF | in cpu_back | those in files beside their states | after g | upto(t) <= OptF.before(t), sum = y |
| ParOut | departures | device part's new parameters leave, to the host or files | idle gap | sum = v = D + K <= 1 - x |
| Drop | Departure.drop | those of them that are released once they have left | idle gap | sum = D |
| ParIn | Departure.back | device part comes back | idle gap | upto(t) <= Drop.before(t), sum = D |
| d, Back | Away | dropped after a use, back before the next | other gaps | d <= x + v |
| h | sources | frozen group: the part with a copy on the host, or in files | [0, 1] | d <= h, sum <= 1 |
| OutO, InO | states | device part's states | g round to g - 1 | InO.upto(t) <= OutO.before(t) |
| S | total of both | part of the group whose states leave (device part) | [0, 1] | S <= 1 - x |
| Comp | choices | block runs with an option | {0, 1} | sum = 1 |
| ActOut, ActIn | Choices.trips | what the option offloads | near F, near B | sum by Comp |
| Z | leaving | interface value leaves between forwards and backwards | {0, 1} | |
| Next | handed | part of its copies, or of its gradient's, away until the next step | [0, 1] | <= Z of a value |
| Time | time | seconds of a step | s | >= each resource's seconds |
| Level | level | everything on the device in a step | <= budget | Level[t] = Level[t - 1] + rise of step t |
| | in turn | that at the first and last of several computes | <= budget | Level less what comes later, or has gone |
| In, Out | links | seconds of a step's copies over one link, if alone, those per copy included | s | |
| Host | host | what is on the host for some steps, if these are counted | bytes | as Level |
| M | least | the budget, if the program minimises it | bytes | |

With several micro-batches the steps hold up to three passes (see problem.py). Decisions within a pass (Comp, Z, d, and
the gradients of all passes but the last) are made once and count in each pass; so are those about the gaps between
passes. f is the first pass's, g the last's. The device part's total of gradients stays from the first pass's last
gradient until u. For N micro-batches the seconds of the middle pass's steps count N - 2 times.

If passes have several micro-batches, all gradients are added up on the device. Between two passes, T <= 1 of a group's
total leaves (LeadOut) and returns, whoever updates. The last pass's seconds and copies are those of its micro-batches,
its memory that of a full pass.

Where updates are speculated (Problem.speculates), Opt begins after g although there is a gate, and ParInC from 2L on.

Splitting ParOut into two parts costs nothing: the released part may be assumed to have left first. Bytes and seconds
are scaled only in this file: a budget is 1000 units, and so are the seconds that no plan can avoid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from ..linear import ONE, Builder, LinearModel, Terms, accumulate, add
from ..problem import Problem
from ..resources import HOST, Path, Resource
from ..sharing import least_seconds
from .account import Account
from .blocks import Choices, add_blocks
from .casts import add_cast_rows
from .columns import GroupColumns, mark
from .groups import add_group
from .held import held_bytes, hold_in_turn
from .streamed import streaming_solution
from .values import Handed, Leaving, add_values

Goal = Literal["time", "device", "host", "host within device"]
_HOST_GOALS = ("host", "host within device")

SCALE = 1000.0
TRAFFIC_WEIGHT = 1e-4  # weight of all bytes that could move, relative to the unavoidable seconds: it only breaks ties
SMALLEST = 1e-12  # coefficients below this are rounding errors of bytes that come and go
STREAMED_PART = 1e-2  # least unit, as a part of the safe plan's seconds, or coefficients get too large
SPREAD_WEIGHT = 1e-6  # weight of the steps' mean bytes, so that only binding steps are full


@dataclass(frozen=True)
class Program:
    """A linear model and the meaning of its columns.

    Parameters
    ----------
    memory: device bytes by step; empty if the goal is the host. A step that runs for several micro-batches has those of
        its first and of its last compute, since in between the bytes change evenly.
    host: bytes on the host, by step if they are counted in time, otherwise of the whole iteration. Both are unscaled.
    device_rows: the expressions that the device budget bounds: (step, bytes).
    time: seconds of each step, in units of `time_unit_s`; empty unless the goal is time. times: how often each step
        happens in an iteration.
    busy: by resource, the seconds that an iteration's work on it takes if nothing else is under way.
    traffic_slack_s: the most that the tie-breaking term can add to the objective.
    """

    model: LinearModel
    groups: dict[str, GroupColumns]
    choices: tuple[Choices, ...]
    leaving: tuple[Leaving, ...]
    handed: tuple[Handed, ...]
    memory: tuple[tuple[Terms, ...], ...]
    device_rows: tuple[tuple[int, Terms], ...]
    host: tuple[Terms, ...]
    time: tuple[Terms, ...]
    times: tuple[int, ...]
    time_unit_s: float
    traffic_slack_s: float
    busy: Mapping[Resource, Terms]


def state_program(problem: Problem, goal: Goal = "time") -> Program:
    """Build the program of `problem`.

    Parameters
    ----------
    goal: the least seconds within both budgets ("time"); the least device budget with the host budget as given
        ("device"); the least host budget with unlimited device memory ("host"); or that with the device budget as
        given ("host within device").

    Source: OffMate, section 4.1, with the two-part flows of the legend above.
    """
    in_ram = problem.without_casts  # what is cast takes the host's link as it does
    builder, account = Builder(), Account.of(in_ram.rates, problem.n_steps, problem.host_in_time)
    _keep_buffers(problem, builder, account)
    choices = add_blocks(problem, builder, account)
    leaving, handed = add_values(problem, builder, account)
    groups = {g.name: add_group(problem, g, builder, account) for g in problem.groups}
    start, user = _hold_the_rest(problem, choices, handed, account)
    unit_s = max(_unavoidable_s(problem), STREAMED_PART * streaming_solution(problem).objective_s) / SCALE or 1.0
    time: tuple[Terms, ...] = ()
    if goal == "time":
        time = _time_rows(in_ram, builder, account, unit_s)
        add_cast_rows(problem, time, builder, account, unit_s)
        traffic_bytes = _most(account.traffic, builder)
        weight = TRAFFIC_WEIGHT * SCALE / traffic_bytes if traffic_bytes else 0.0
        objective = add(*((problem.times(step), t) for step, t in enumerate(time)), (weight, account.traffic))
    else:
        objective = builder.column("M", inf)
    memory: tuple[tuple[Terms, ...], ...] = ()
    device_rows: tuple[tuple[int, Terms], ...] = ()
    if goal != "host":
        unit = (_most_on_device(problem) if goal == "device" else problem.device_budget_bytes) / SCALE or 1.0
        levels = _levels(builder, account.rise, unit, "Level")
        memory = tuple(_in_turn(level, step, account) for step, level in enumerate(levels))
        outside = [
            (step, add((1.0, levels[step]), (1.0, more)))
            for begins in problem.each(0)
            for step, more in ((begins, start), (begins + problem.n_blocks, user))
        ]
        within = [(step, terms) for step, rows in enumerate(memory) for terms in rows]
        device_rows = (*within, *outside)
        most = objective if goal == "device" else {ONE: problem.device_budget_bytes / unit}
        for i, (step, terms) in enumerate(device_rows):
            name = f"memory[{step}{'' if i < len(within) else ',outside'}]"
            builder.at_most_zero(name, add((1 / unit, terms), (-1.0, most)))
    host = _tier_rows(in_ram, builder, account, goal, objective)
    if goal == "device":
        spread = SPREAD_WEIGHT / problem.n_steps / unit
        objective = add((1.0, objective), *((spread, level) for level in levels))
    objective.pop(ONE, None)
    return Program(
        model=builder.freeze(objective),
        groups=groups,
        choices=choices,
        leaving=leaving,
        handed=handed,
        memory=memory,
        device_rows=device_rows,
        host=host,
        time=time,
        times=tuple(map(problem.times, range(problem.n_steps))),
        time_unit_s=unit_s,
        traffic_slack_s=TRAFFIC_WEIGHT * SCALE * unit_s,
        busy=_busy(problem, account),
    )


def _in_turn(level: Terms, step: int, account: Account) -> tuple[Terms, ...]:
    """Return a step's bytes while its first and its last micro-batch compute; one expression if these are the same."""
    changes = account.not_yet[step], account.no_longer[step]
    return tuple(add((1.0, level), (-1.0, change)) for change in changes) if any(changes) else (level,)


def _busy(problem: Problem, account: Account) -> dict[Resource, Terms]:
    """Return the seconds of an iteration's work on each resource."""
    spent = {one: [(1.0, terms) for terms in steps] for one, steps in account.seconds.items()}
    for link, steps in account.moved.items():
        spent[link] = [(1 / problem.rates.bytes_per_s(link), terms) for terms in steps]
    return {
        one: add(*((problem.times(step) * rate, terms) for step, (rate, terms) in enumerate(steps)))
        for one, steps in spent.items()
    }


def _hold_the_rest(
    problem: Problem, choices: tuple[Choices, ...], handed: tuple[Handed, ...], account: Account
) -> tuple[Terms, Terms]:
    """Count held bytes and the blocks' own peaks.

    Returns: the bytes beyond those of a pass's first step while the code before the first block runs, and the bytes
    beyond those of its first backward step while the user's code runs.
    """
    n = problem.n_blocks
    shared_bytes = sum(s.bytes for s in problem.shared)
    handed_in = sum(o.grad_bytes for o in problem.outputs if problem.runs[o.made][0][1] > n)
    for step, held in enumerate(held_bytes(problem)):
        account.hold(step, held, {ONE: 1.0})
    for i in range(n if problem.per_step > 1 else 0):
        hold_in_turn(problem, i, choices[i], account)
    start: Terms = {ONE: float(problem.start_peak_bytes - shared_bytes)}
    user: Terms = {ONE: float(problem.user_bytes - handed_in)}
    for i, block in enumerate(choices):
        for o, column in block.columns.items():
            option = problem.blocks[i].options[o]
            for forward, backward in problem.runs[i]:
                account.hold(forward, option.forward_peak_bytes, column)
                account.hold(backward, option.backward_peak_bytes, column)
            if i == 0:
                accumulate(start, -option.forward_peak_bytes, column)
            if i == n - 1:  # the user's code runs between this block's forward and its backward
                accumulate(user, option.saved_bytes - option.backward_peak_bytes, column)
    for one in handed:
        if n in one.hand.returns:  # away from the last forward to the first backward
            accumulate(user, -one.hand.bytes, one.part)
    return start, user


def _levels(builder: Builder, rises: Iterable[Terms], unit: float, name: str) -> tuple[Terms, ...]:
    """Add a column per step for bytes that rise from step to step, in units of `unit`; return the bytes."""
    last: Terms = {}
    levels = []
    for step, rise in enumerate(rises):
        level = builder.column(f"{name}[{step}]", inf)
        change = add((1 / unit, rise), (1.0, last), (-1.0, level))
        builder.at_most_zero(
            f"{name.lower()}[{step}]", {c: a for c, a in change.items() if abs(a) > SMALLEST}, equal=True
        )
        levels.append(add((unit, level)))
        last = level
    return tuple(levels)


def _tier_rows(problem: Problem, builder: Builder, account: Account, goal: Goal, least: Terms) -> tuple[Terms, ...]:
    """Bound the bytes on each tier by its capacity, or those on the host by `least` if that is the goal.

    Returns: the bytes on the host; by step if they are counted in time.
    """
    host, *others = problem.state_tiers
    asked, always = goal in _HOST_GOALS, account.tiers[HOST]
    unit = (_most_on_host(problem, builder, account) if asked else host.capacity_bytes) / SCALE or 1.0
    limit = least if asked else {ONE: host.capacity_bytes / unit}
    rows: tuple[Terms, ...] = (always,)
    if account.passing is not None:
        passing = _levels(builder, account.passing, unit, "Host")
        rows = tuple(add((1.0, always), (1.0, level)) for level in passing)
    for step, used in enumerate(rows):
        name = HOST if account.passing is None else f"{HOST}[{step}]"
        builder.at_most_zero(name, add((1 / unit, used), (-1.0, limit)))
    for tier in others:
        unit = tier.capacity_bytes / SCALE or 1.0
        builder.at_most_zero(
            tier.name, add((1 / unit, account.tiers[tier.name]), (-tier.capacity_bytes / unit, {ONE: 1.0}))
        )
    return rows


def _keep_buffers(problem: Problem, builder: Builder, account: Account) -> None:
    """Count what is in the host's memory or passes it: all the time, or as far as anything passes there."""
    account.keep(problem.host_fixed_bytes + problem.arrival_bytes + problem.buffers_bytes, {ONE: 1.0})
    if problem.ring_bytes:
        account.ring = builder.column("Ring")
        account.keep(problem.ring_bytes, account.ring)
    if problem.cast_tier is not None and problem.cast_tier.buffers_bytes:
        account.casts = builder.column("Casts")
        account.keep(problem.cast_tier.buffers_bytes, account.casts)


def _time_rows(problem: Problem, builder: Builder, account: Account, unit_s: float) -> tuple[Terms, ...]:
    """Add the time of every step, at least the seconds of each resource, in units of `unit_s`."""
    rates, times = problem.rates, []
    for begins in problem.each(0):
        account.spend(Resource.COMPUTE, begins, problem.share(begins) * problem.start_s, {ONE: 1.0})
    for resource in rates.working:  # updates wait for the gate
        account.spend(resource, problem.first_turn_around, problem.gate_s, {ONE: 1.0})
    ways = [(path, link, f"{word}{mark(path)}") for path in rates.paths.values() for link, word in _words(path)]
    sums = tuple(least_seconds(rates))
    for t in range(problem.n_steps):
        time, *columns = (builder.column(f"{name}[{t}]", inf) for name in ("Time", *(name for *_, name in ways)))
        links = {link: column for (_, link, _), column in zip(ways, columns)}
        serial: Terms = {}
        for (path, link, name), column in zip(ways, columns):
            units = 1 / (path.bytes_per_s(link) * unit_s)
            builder.at_most_zero(f"link {name.lower()}[{t}]", add((units, account.moved[link][t]), (-1.0, column)))
            builder.at_most_zero(f"{name.lower()}[{t}]", add((1.0, column), (-1.0, time)))
            accumulate(serial, units, account.serial[link][t])
        for path, link, name in ways:
            slower = min(1.0, sum(map(path.share, path.links)) - 1)
            if slower > 0:  # the link with more bytes moves its surplus at its own rate
                others = ((slower, links[other]) for other in path.links if other != link)
                builder.at_most_zero(f"both {name.lower()}[{t}]", add((1.0, links[link]), *others, (-1.0, time)))
        seconds = {one: add((1 / unit_s, account.seconds[one][t])) for one in rates.working}
        beside = {Resource.COMPUTE: serial, Resource.CPU: {ONE: rates.manage_s / unit_s}}
        for resource, spent in seconds.items():
            row = add((1.0, spent), (1.0, beside.get(resource, {})), (-1.0, time))
            builder.at_most_zero(f"{resource}[{t}]", row)
        busy = links | seconds
        for name, weights in sums:
            used = ((weight, busy[one]) for one, weight in weights.items())
            builder.at_most_zero(f"{name}[{t}]", add(*used, (-1.0, time)))
        if rates.shared_cores:
            copies = ((path.share(link), links[link]) for path, link, _ in ways)
            working = ((1.0, spent) for spent in seconds.values())
            builder.at_most_zero(f"cores[{t}]", add(*working, *copies, (-1.0, time)))
        times.append(time)
    return tuple(times)


def _words(path: Path) -> tuple[tuple[Resource, str], ...]:
    return (path.into, "In"), (path.out, "Out")


def _unavoidable_s(problem: Problem) -> float:
    """Return the seconds that no plan avoids: each block's cheapest option, the start, and the gate."""
    return problem.all_computes_s + problem.gate_s


def _most(terms: Terms, builder: Builder) -> float:
    """Return an upper bound of an expression, by its columns' own bounds."""
    return sum(max(0.0, a) * (1.0 if c == ONE else builder.upper[c]) for c, a in terms.items())


def _most_on_host(problem: Problem, builder: Builder, account: Account) -> float:
    """Return more bytes than any plan can have on the host at once."""
    rises = account.passing or ()
    return _most(account.tiers[HOST], builder) + sum(_most(rise, builder) for rise in rises)


def _most_on_device(problem: Problem) -> float:
    """Return more bytes than any plan can have on the device at once."""
    groups = sum(g.param_bytes + g.grad_bytes * min(problem.micro_batches, 2) + g.state_bytes for g in problem.groups)
    options = [o for block in problem.blocks for o in block.options]
    saved = sum(max(o.saved_bytes + o.offloaded_bytes for o in block.options) for block in problem.blocks)
    peaks = max(max(o.forward_peak_bytes, o.backward_peak_bytes) for o in options)
    values = sum(v.bytes + v.grad_bytes for v in problem.values) + sum(
        2 * o.bytes + o.grad_bytes for o in problem.outputs
    )
    outside = sum(s.bytes for s in problem.shared) + problem.start_peak_bytes + problem.user_bytes
    return float(groups + saved + peaks + values + outside)
