"""Bytes on the device that no decision changes, and what a block's computes hold of them, one after another."""

from __future__ import annotations

from ..fat_steps import all_but_one, in_turn
from ..linear import ONE
from ..problem import Problem
from .account import Account
from .blocks import Choices


def held_bytes(problem: Problem) -> list[int]:
    """Count the bytes on the device in each step that no decision changes.

    These are shared values, outputs (of this iteration and, until the forwards have ended, of the last one), gradients
    of outputs, and gradient accumulators between the steps that make and consume them. Bytes that a step's own peak
    already contains are left out for that step.

    Returns: one integer per step, in bytes, of all micro-batches that a step runs for.
    """
    held = [0] * problem.n_steps
    n, last = problem.n_blocks, problem.passes[-1]

    def add(first: int, end: int, amount: int) -> None:
        for step in range(first, end + 1):
            held[step] += amount

    for out in problem.outputs:
        add(0, n - 1, out.bytes)
    for start in problem.passes:
        end = start + problem.pass_steps - 1
        for shared in problem.shared:
            add(start, start + shared.last_step if start == last else min(start + shared.last_step, end), shared.bytes)
        for out in problem.outputs:
            add(start + out.made + 1, problem.n_steps - 1 if start == last else end + n, out.bytes)
            add(start + n, start + problem.backward_step(out.made) - 1, out.grad_bytes)
        for value in problem.values:
            if value.grad_steps:
                add(start + value.grad_steps[0] + 1, start + problem.backward_step(value.made) - 1, value.grad_bytes)
        for group in problem.groups:
            if len(group.grad_steps) > 1:
                add(start + group.grad_steps[0] + 1, start + group.grad_steps[-1], problem.per_step * group.grad_bytes)
    return held


def hold_in_turn(problem: Problem, i: int, block: Choices, account: Account) -> None:
    """Count what comes, or goes, with every compute of a block, where its steps run for several micro-batches.

    A forward saves values for its backward, which releases them; both make what they hand on.
    """
    handed = in_turn(problem, i)
    for forward, backward in problem.runs[i]:
        account.come_in_turn(forward, handed.made, {ONE: 1.0})
        account.come_in_turn(backward, handed.gradients_made, {ONE: 1.0})
        account.go_in_turn(backward, handed.gradients_taken, {ONE: 1.0})
        for o, column in block.columns.items():
            option = problem.blocks[i].options[o]
            saved = all_but_one(problem, option.saved_bytes + option.offloaded_bytes)
            account.come_in_turn(forward, saved, column)
            account.go_in_turn(backward, saved, column)
