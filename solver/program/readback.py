"""Conversion of the columns' values to fractions, seconds and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from ..answer import RawAnswer
from ..handed import Hand
from ..linear import Flow, Terms, add, evaluate
from ..resources import HOST
from ..solution import ActivationFlow, Gap, GroupFlow, HandFlow, Solution
from .blocks import Choices
from .columns import Away, GroupColumns, RoundTrip
from .model import Program

SMALLEST = 1e-7  # fractions below this are rounding errors of the solver


def read_solution(program: Program, answer: RawAnswer) -> Solution:
    """Read the plan from an answer with values."""
    values = answer.values
    chosen = tuple(
        max(block.columns, key=lambda o, c=block.columns: evaluate(c[o], values))  # type: ignore[misc]
        for block in program.choices
    )
    away = [z for z in program.leaving if evaluate(z.column, values) > 0.5]
    step_s = tuple(evaluate(t, values) * program.time_unit_s for t in program.time)
    objective_s = sum(seconds * program.times[step] for step, seconds in enumerate(step_s))
    # the tie-breaking term of the objective is no part of a plan's seconds
    bound_s = min(max(0.0, answer.lower_bound * program.time_unit_s - program.traffic_slack_s), objective_s)
    return Solution(
        status=answer.status,
        objective_s=objective_s,
        lower_bound_s=bound_s,
        gap=(objective_s - bound_s) / objective_s if objective_s > 0 else 0.0,
        solve_s=answer.solve_s,
        options=chosen,
        activations=tuple(_activations(block, values) for block in program.choices),
        offloaded_values=frozenset(z.name for z in away),
        value_tiers={z.name: z.tier for z in away if z.tier != HOST},
        handed=_handed(program, values),
        groups={name: read_group(columns, values) for name, columns in program.groups.items()},
        step_s=step_s,
        memory_bytes=tuple(round(max(evaluate(row, values) for row in rows)) for rows in program.memory),
        host_bytes=round(max(evaluate(row, values) for row in program.host)),
        busy_s={str(resource): evaluate(seconds, values) for resource, seconds in program.busy.items()},
    )


def _handed(program: Program, values: tuple[float, ...]) -> tuple[HandFlow, ...]:
    found: dict[Hand, dict[str, float]] = {}
    for one in program.handed:
        part = _fraction(one.part, values)
        if part > 0:
            found.setdefault(one.hand, {})[one.tier] = part
    return tuple(HandFlow(hand, tiers) for hand, tiers in found.items())


def read_group(columns: GroupColumns, values: tuple[float, ...]) -> GroupFlow:
    """Read one group's flows: fractions in [0, 1], by step."""
    return GroupFlow(
        cpu_part=_fraction(columns.cpu_part, values),
        grad_out=_steps([columns.grad_out], values),
        lead_out=_steps([columns.lead_out], values),
        lead_back=_steps([columns.lead_back], values),
        cpu_update=_steps([columns.cpu_update], values),
        cpu_back=_steps([columns.cpu_back], values),
        out=_steps([flow for one in columns.departures for flow in (one.drop, one.keep)], values),
        drop=_steps([one.drop for one in columns.departures], values),
        back=_steps([one.back for one in columns.departures], values),
        gaps=tuple(_gap(list(ways), values) for _, ways in groupby(columns.away, key=lambda away: away.stay)),
        wait_out=_steps([columns.wait.out] if columns.wait else [], values),
        wait_in=_steps([columns.wait.back] if columns.wait else [], values),
        state_out=_steps([trip.out for trip in columns.states], values),
        state_in=_steps([trip.back for trip in columns.states], values),
        state_tiers=_tiers(columns.states, values),
        sources=_sources(columns, values),
        from_files=_fraction(columns.from_files, values),
        cast=_fraction(columns.cast, values),
    )


def _activations(block: Choices, values: tuple[float, ...]) -> ActivationFlow:
    total = sum(evaluate(trip.out.total, values) for trip in block.trips)
    if total < SMALLEST:
        return ActivationFlow()
    flows = [trip.out for trip in block.trips], [trip.back for trip in block.trips]
    out, back = ({step: part / total for step, part in _steps(one, values).items()} for one in flows)
    return ActivationFlow(out, back, _tiers(block.trips, values))


def _tiers(trips: tuple[RoundTrip, ...], values: tuple[float, ...]) -> dict[str, float]:
    """Return the fraction of the total that leaves to each tier; empty if there is only one."""
    parts = {trip.tier: _fraction(trip.out.total, values) for trip in trips}
    total = sum(parts.values())
    return {tier: part / total for tier, part in parts.items()} if len(parts) > 1 and total > 0 else {}


def _sources(columns: GroupColumns, values: tuple[float, ...]) -> dict[str, float]:
    """Return the part that comes from each tier: the most that any gap drops; empty if there is only one tier.

    Of a trainable group, it is the part of which the device makes the values that leave to the tier.
    """
    if len(columns.sources) < 2:
        return {}
    if columns.departures:
        return {one.path.tier: _fraction(one.part, values) for one in columns.departures}
    found: dict[str, float] = {}
    for away in columns.away:
        found[away.path.tier] = max(found.get(away.path.tier, 0.0), _fraction(away.part, values))
    return found


def _gap(ways: list[Away], values: tuple[float, ...]) -> Gap:
    """Sum the parts that are dropped in one gap, and return from several tiers."""
    stay, dropped = ways[0].stay, add(*((1.0, away.part) for away in ways))
    back = _steps([away.back for away in ways], values)
    return Gap(stay.after, stay.before, _fraction(dropped, values), back, stay.shifts)


def _steps(flows: Iterable[Flow | None], values: tuple[float, ...]) -> dict[int, float]:
    """Sum the flows by step, in cyclic order."""
    moved: dict[int, Terms] = {}
    order: tuple[int, ...] = ()
    for one in flows:
        if one is not None:
            order = one.span
            for step, part in one.each():
                moved[step] = add((1.0, moved.get(step, {})), (1.0, part))
    fractions = {step: _fraction(moved[step], values) for step in order if step in moved}
    return {step: fraction for step, fraction in fractions.items() if fraction > 0}


def _fraction(terms: Terms, values: tuple[float, ...]) -> float:
    value = min(max(evaluate(terms, values), 0.0), 1.0)
    return value if value >= SMALLEST else 0.0
