"""Rounding of offloaded values: they leave and return as a whole, within the device memory of their fractions."""

from __future__ import annotations

from ..decisions import ActivationStay
from ..problem import Problem
from ..solution import Solution
from .tiers import Spread
from .walk import NOISE, Curve


def whole_activations(
    problem: Problem, solution: Solution, spread: Spread | None = None
) -> tuple[tuple[ActivationStay | None, ...], list[float]]:
    """Choose the steps in which the values that each block's option offloads leave and return as a whole.

    They leave as late and return as early as their fractions, and the bytes that other blocks' whole values spare,
    allow. A copy then has the most time before a compute waits for it.

    Parameters
    ----------
    solution: an answer to the problem, with a plan. spread: what tiers have received so far, nothing if None.

    Returns: a stay per block, None if nothing is offloaded; and the bytes that are left over, by step.
    """
    spare = [0.0] * problem.n_steps
    spread = spread or Spread.of(problem, solution)
    stays = tuple(_stay(problem, solution, i, spare, spread) for i in range(problem.n_blocks))
    return stays, spare


def _stay(problem: Problem, solution: Solution, i: int, spare: list[float], spread: Spread) -> ActivationStay | None:
    """Return one block's stay, and update `spare` by the bytes that it leaves and `spread` by its tier."""
    flow, size = solution.activations[i], problem.blocks[i].options[solution.options[i]].offloaded_bytes
    if not size:
        return None
    _, backward = problem.runs[i][0]
    gone, come = Curve(problem, i, flow.out), Curve(problem, i, flow.back)
    there = {i + k: size * (1 - gone.up_to(k - 1) + come.up_to(k)) for k in range(1, backward - i)}
    lacks = {step: size * (1 - NOISE) > part + spare[step] for step, part in there.items()}
    out = next(step for step in range(i, backward) if lacks.get(step + 1, True))
    back = next(step for step in range(backward, i, -1) if lacks.get(step - 1, True))
    out, back = min(out, max(flow.out)), max(back, min(flow.back))
    for step, part in there.items():
        used = size * (step <= out or step >= back)
        for again in problem.each(step):
            spare[again] += part - used
    return ActivationStay(out, back, spread.take(size, flow.tiers))
