"""Columns and rows of interface values and of their gradients: held, or away between the steps that use them.

All passes are decided alike: each column counts in every pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..fat_steps import all_but_one
from ..handed import UNDER_WAY, Hand, away_window, hands, most_away
from ..linear import ONE, Builder, Terms, add
from ..problem import Problem, Value
from ..resources import HOST, Path
from .account import Account
from .columns import mark


@dataclass(frozen=True)
class Leaving:
    """Z of one interface value: it leaves to a tier in step `out` of the first pass and is back in step `back`.

    If a step runs for several micro-batches, only the first one's is back then; each other one's comes in the step that
    reads it.
    """

    name: str
    out: int
    back: int
    column: Terms
    tier: str


@dataclass(frozen=True)
class Handed:
    """Next of one hand: the part of the most copies that can be away which leave to a tier."""

    hand: Hand
    part: Terms
    tier: str


def add_values(problem: Problem, builder: Builder, account: Account) -> tuple[tuple[Leaving, ...], tuple[Handed, ...]]:
    """Add the interface values: held until their last use, or away between last forward and first backward use."""
    result: list[Leaving] = []
    for value in problem.values:
        window = away_window(problem, value)
        ways = []
        for tier in problem.roaming_tiers if window is not None else ():
            column = builder.column(f"Z[{value.name}{mark(tier.path)}]", integer=True)
            if tier.name != HOST or not account.host_in_time:
                account.keep(value.bytes, column, tier.name)
            ways.append((tier.path, Leaving(value.name, *(window or (0, 0)), column, tier.name)))
        if len(ways) > 1:
            together = ((1.0, leaving.column) for _, leaving in ways)
            builder.at_most_zero(f"one tier[{value.name}]", add(*together, (-1.0, {ONE: 1.0})))
        for start in problem.each(0):
            account.hold_over(range(start + value.made + 1, start + value.uses[-1] + 1), value.bytes, {ONE: 1.0})
            account.go_in_turn(start + value.uses[-1], all_but_one(problem, value.bytes), {ONE: 1.0})
            for path, leaving in ways:
                _count_leaving(problem, value, start, leaving, path, account)
        result += [leaving for _, leaving in ways]
    return tuple(result), _add_handed(problem, {(z.name, z.tier): z.column for z in result}, builder, account)


def _count_leaving(problem: Problem, value: Value, start: int, leaving: Leaving, path: Path, account: Account) -> None:
    slots, one_bytes = problem.slots_at(start), value.bytes // problem.per_step
    rest_bytes = value.bytes - one_bytes  # of the other micro-batches of the step
    serial, moved_bytes = 1 / slots if leaving.out == value.made else 0.0, problem.share(start) * value.bytes
    out, back, column = start + leaving.out, start + leaving.back, leaving.column
    account.hold_over(range(out + 1, back), -value.bytes, column)
    account.go_in_turn(out, all_but_one(problem, value.bytes), column)
    account.move(path.out, out, moved_bytes, column, copies=slots, serial=serial)
    account.move(path.into, back, one_bytes, column)
    if rest_bytes:
        account.hold(back, -rest_bytes, column)
        account.come_in_turn(back, one_bytes, column)
        # While one is read, the next one comes.
        account.come_in_turn(back + 1, rest_bytes - one_bytes, column)
        account.go_in_turn(back + 1, -one_bytes, column)
        account.move(path.into, back + 1, moved_bytes - one_bytes, column, copies=slots - 1)
    if path.tier == HOST and account.host_in_time:
        account.stay(range(out, back + (2 if rest_bytes else 1)), value.bytes, column)


def _add_handed(
    problem: Problem, leaving: Mapping[tuple[str, str], Terms], builder: Builder, account: Account
) -> tuple[Handed, ...]:
    """Add what may be away between neighbouring steps.

    A value that has been away for the next forward, and leaves for its backward, does so without another copy.

    Parameters
    ----------
    leaving: Z by value and tier.
    """
    found: list[Handed] = []
    for hand in hands(problem):
        own: list[Handed] = []
        for tier in problem.roaming_tiers:
            part = builder.column(f"Next[{hand}{mark(tier.path)}]")
            if hand.of_leaving:
                later = leaving[hand.item.name, tier.name]
                builder.at_most_zero(f"next[{hand}{mark(tier.path)}]", add((1.0, part), (-1.0, later)))
            elif tier.name != HOST or not account.host_in_time:
                account.keep(hand.bytes, part, tier.name)
            for start in problem.each(0):
                _count_handed(problem, hand, start, (tier.path, part), account)
            own.append(Handed(hand, part, tier.name))
        if len(own) > 1:
            builder.at_most_zero(f"next[{hand}]", add(*((1.0, one.part) for one in own), (-1.0, {ONE: 1.0})))
        found += own
    return tuple(found)


def _count_handed(problem: Problem, hand: Hand, start: int, way: tuple[Path, Terms], account: Account) -> None:
    """Count what leaves in the step that makes it, and returns in each of those that follow it."""
    (path, part), copies = way, min(most_away(problem), problem.slots_at(start))
    moved_bytes, one_bytes = problem.share(start) * hand.bytes, hand.bytes // most_away(problem)
    two_bytes, few_bytes = 2 * one_bytes, UNDER_WAY * one_bytes
    made, *returns = (start + step for step in (hand.made, *hand.returns))
    account.go_in_turn(made, hand.bytes, part)
    account.come_in_turn(made, -(two_bytes if hand.left else few_bytes), part)
    if not hand.left:
        account.move(path.out, made, moved_bytes, part, copies=copies)
    for step in returns:
        account.move(path.into, step, moved_bytes, part, copies=copies)
    for step in returns[:-1]:  # one is read, and the next one comes
        account.come_in_turn(step, hand.bytes - two_bytes, part)
        account.go_in_turn(step, hand.bytes - two_bytes, part)
    account.come_in_turn(returns[-1], hand.bytes, part)
    account.go_in_turn(returns[-1], -few_bytes, part)
    if hand.goes_on:
        account.move(path.out, returns[-1], -moved_bytes, part, copies=-copies)
    if path.tier == HOST and account.host_in_time:
        first, until = made + hand.left, returns[-1] + (not hand.goes_on)
        account.stay(range(first, until), hand.bytes, part)
