"""Rounding of what blocks offload: it leaves and returns as one, needing no more device memory than its fractions."""

from __future__ import annotations

from ..decisions import ActivationStay
from ..problem import Problem
from ..solution import Solution
from .tiers import Spread
from .walk import NOISE, Curve


def whole_activations(problem: Problem, solution: Solution) -> tuple[tuple[ActivationStay | None, ...], list[float]]:
    """When what each block's option offloads leaves as one, and when it returns.

    It leaves as late and returns as early as its fractions allow, and what other blocks' whole ones spare. A copy then
    has the most time before a compute waits for it.

    Parameters
    ----------
    solution: an answer to the problem, with a plan.

    Returns: a stay per block, None where nothing is offloaded; and the bytes that are left over, by step.
    """
    spare = [0.0] * problem.n_steps
    spread = Spread()
    stays = tuple(_stay(problem, solution, i, spare, spread) for i in range(problem.n_blocks))
    return stays, spare


def _stay(problem: Problem, solution: Solution, i: int, spare: list[float], spread: Spread) -> ActivationStay | None:
    """One block's stay; `spare` is changed to what is left after it, `spread` to what tiers lack then."""
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
