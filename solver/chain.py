"""Columns and rows of the chain: each block's option and the interface values between blocks.

Every pass does what the others do: a column is counted in each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .account import Account
from .linear import ONE, Builder, Terms, add
from .problem import Option, Problem, ProblemError, Value


@dataclass(frozen=True)
class Choices:
    """Comp of one block: a binary column by (option index, early)."""

    columns: dict[tuple[int, bool], Terms]


@dataclass(frozen=True)
class Leaving:
    """Z of one interface value: leaves in step `out` of the first pass, is back in step `back`; so in every pass."""

    name: str
    out: int
    back: int
    column: Terms


def add_blocks(problem: Problem, builder: Builder, account: Account) -> tuple[Choices, ...]:
    """Exactly one option per block; peaks are counted by the caller."""
    return tuple(_add_block(problem, i, builder, account) for i in range(problem.n_blocks))


def _add_block(problem: Problem, i: int, builder: Builder, account: Account) -> Choices:
    block, backward = problem.blocks[i], problem.backward_step(i)
    columns: dict[tuple[int, bool], Terms] = {}
    for o, option in enumerate(block.options):
        if option.offloaded_bytes and i > problem.n_blocks - 2:
            continue  # its backward follows at once
        for early in (False, True) if option.offloaded_bytes else (False,):
            column = builder.column(f"Comp[{i},{o},{'early' if early else 'late'}]", integer=True)
            columns[o, early] = column
            account.keep_on_host(option.offloaded_bytes, column)
            for start in problem.passes:
                _count_option(option, start + i, start + backward, early, column, account)
    if not columns:
        raise ProblemError(f"block {block.name}: every option offloads, but its backward follows its forward")
    one = add(*((1.0, c) for c in columns.values()), (-1.0, {ONE: 1.0}))
    builder.at_most_zero(f"one option[{i}]", one, equal=True)
    return Choices(columns)


def _count_option(option: Option, forward: int, backward: int, early: bool, column: Terms, account: Account) -> None:
    account.compute_in(forward, option.forward_s, column)
    account.compute_in(backward, option.backward_s, column)
    account.hold_over(range(forward + 1, backward), option.saved_bytes, column)
    amount = option.offloaded_bytes
    if early:
        for step in (forward + 1, backward - 1):
            account.hold(step, amount, column)
        account.move("out", forward + 1, amount, column)
        account.move("in", backward - 1, amount, column)
    else:
        account.move_serially("out", forward, amount, column)
        account.move_serially("in", backward, amount, column)


def add_values(problem: Problem, builder: Builder, account: Account) -> tuple[Leaving, ...]:
    """Interface values are held until their last use, or leave between their last forward and first backward use."""
    result = []
    for value in problem.values:
        window = away_window(problem, value)
        column = None
        if window is not None:
            column = builder.column(f"Z[{value.name}]", integer=True)
            account.keep_on_host(value.bytes, column)
            result.append(Leaving(value.name, *window, column))
        for start in problem.passes:
            account.hold_over(range(start + value.made + 1, start + value.uses[-1] + 1), value.bytes, {ONE: 1.0})
            if window is not None and column is not None:
                _count_leaving(value, start, window, column, account)
    return tuple(result)


def _count_leaving(value: Value, start: int, window: tuple[int, int], column: Terms, account: Account) -> None:
    out, back = start + window[0], start + window[1]
    account.hold_over(range(out + 1, back), -value.bytes, column)
    if window[0] == value.made:
        account.move_serially("out", out, value.bytes, column)
    else:
        account.move("out", out, value.bytes, column)
    account.move("in", back, value.bytes, column)


def away_window(problem: Problem, value: Value) -> tuple[int, int] | None:
    """The first pass's steps in which a value leaves and comes back, None where it would be away for no step."""
    forwards = [value.made, *(u for u in value.uses if u < problem.n_blocks)]
    backwards = [u for u in value.uses if u >= problem.n_blocks]
    if not backwards or backwards[0] - forwards[-1] < 3:
        return None
    return forwards[-1], backwards[0] - 1
