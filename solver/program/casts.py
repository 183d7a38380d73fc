"""Parameters that are cast from their float32 copies: the part of which RAM holds nothing else, and what casts take."""

from __future__ import annotations

from ..linear import Builder, Terms, accumulate, add
from ..problem import Group, Problem
from .account import Account
from .columns import NONE
from .spans import Span


def add_cast_part(
    problem: Problem, group: Group, span: Span, in_place: Terms, builder: Builder, account: Account
) -> Terms:
    """Add the column of the CPU part of which RAM has the float32 copies alone; nothing if none may.

    Its copies to the device are those of the other values in RAM. Each is cast before that.

    Parameters
    ----------
    in_place: the part whose states are in RAM.
    """
    tier = problem.cast_tier
    if tier is None or not problem.may_cast(group) or not in_place:
        return NONE
    cast = builder.column(f"c[{group.name}]")
    builder.at_most_zero(f"c[{group.name}]", add((1.0, cast), (-1.0, in_place)))
    if account.casts:
        builder.at_most_zero(f"casts[{group.name}]", add((1.0, cast), (-1.0, account.casts)))
    account.keep(-group.param_bytes, cast)
    for files in [one for one in problem.state_tiers if one.for_states][:1]:  # for whoever reads them
        account.keep(group.param_bytes, cast, files.name)
    returns = 1 + sum(problem.times(stay.after + shift) for stay in span.between for shift in stay.shifts)
    seconds = problem.rates.copy_s(group.param_bytes, tier.path.into, group.param_copies)
    accumulate(account.cast_s, returns * seconds, cast)
    accumulate(account.traffic, returns * group.param_bytes, cast)
    return cast


def add_cast_rows(problem: Problem, time: tuple[Terms, ...], builder: Builder, account: Account, unit_s: float) -> None:
    """State that casts end within an iteration, and that they share the host memory's rate with everything else in it.

    Parameters
    ----------
    time: of every step, in units of `unit_s`.
    """
    tier = problem.cast_tier
    if tier is None or not account.cast_s:
        return
    whole = [(-float(problem.times(step)), one) for step, one in enumerate(time)]
    builder.at_most_zero("casts", add((1 / unit_s, account.cast_s), *whole))
    shares = problem.rates.host_memory_shares
    if not shares:
        return
    used: list[tuple[float, Terms]] = [(shares[tier.path.into] / unit_s, account.cast_s)]
    for resource, share in shares.items():
        if resource in account.seconds:
            each, rate = account.seconds[resource], 1.0
        elif resource in account.moved:
            each, rate = account.moved[resource], problem.rates.bytes_per_s(resource)
        else:  # the casts' own link
            continue
        used += [(share * problem.times(step) / (rate * unit_s), spent) for step, spent in enumerate(each)]
    builder.at_most_zero("casts' memory", add(*used, *whole))
