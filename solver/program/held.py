"""Bytes on the device that no decision changes."""

from __future__ import annotations

from ..problem import Problem


def held_bytes(problem: Problem) -> list[int]:
    """Count the bytes on the device in each step that no decision changes.

    These are shared values, outputs (of this iteration and, until the forwards have ended, of the last one), gradients
    of outputs, and gradient accumulators between the steps that make and consume them. Bytes that a step's own peak
    already contains are left out for that step.

    Returns: one integer per step, in bytes.
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
