"""Whole tensors for the host near the fractions, with everything else solved again for them.

Rounding alone takes to the host at least what the fractions say, group by group: no step then needs more memory, but
the host and the links get more to do than the program counted. Here the groups' excesses even out, and the program
says what else must follow.
"""

from __future__ import annotations

from dataclasses import replace

from .backends import default, get
from .knapsack import select
from .linear import fixed
from .model import Program, state_program
from .problem import Group, Problem
from .readback import read_solution
from .solution import Solution, Status


def settle(
    problem: Problem, solution: Solution, *, time_limit_s: float = 60.0, gap: float = 0.01, backend: str | None = None
) -> Solution | None:
    """The best flows for the solution's choices when every host part is made of whole tensors.

    Parameters
    ----------
    solution: an answer to the problem, with a plan. time_limit_s, gap, backend: as in `solve`.

    Returns: a solution with the first one's bound; None if whole parts near the fractions do not fit.
    Raises: BackendError if the backend is not installed.
    """
    program = state_program(problem)
    held = _choices(program, solution)
    for name, part in whole_parts(problem, solution).items():
        held |= dict.fromkeys(program.groups[name].cpu_part, part)
    model, kept = fixed(program.model, held)
    answer = (get(backend) if backend else default()).solve(model, time_limit_s, gap)
    if not answer.values:
        return None
    found = held | dict(zip(kept, answer.values))
    values = tuple(found[c] for c in range(len(program.model.upper)))
    settled = read_solution(program, replace(answer, values=values, status=Status.OPTIMAL))
    bound_s = min(solution.lower_bound_s, settled.objective_s)
    gap_to_bound = (settled.objective_s - bound_s) / settled.objective_s if settled.objective_s > 0 else 0.0
    return replace(settled, status=solution.status, lower_bound_s=bound_s, gap=gap_to_bound)


def whole_parts(problem: Problem, solution: Solution) -> dict[str, float]:
    """By trainable group the fraction that whole tensors updated on the host make up.

    In the order of their last gradients each group takes the tensors with which the bytes updated on the host of all
    groups so far are nearest to the fractions'.
    """
    parts: dict[str, float] = {}
    ahead = 0.0
    trainable = (group for group in problem.groups if group.trainable and group.param_bytes)
    for group in sorted(trainable, key=lambda g: (g.grad_steps[-1], g.name)):
        wanted = solution.groups[group.name].cpu_part * group.param_bytes
        chosen = _nearest(group, wanted - ahead)
        ahead += chosen - wanted
        parts[group.name] = chosen / group.param_bytes
    return parts


def _nearest(group: Group, target_bytes: float) -> int:
    """The bytes of the subset of a group's tensors that is nearest to a target."""
    sizes = {tensor.name: tensor.param_bytes for tensor in group.tensors}
    total = group.param_bytes
    target = min(max(0, round(target_bytes)), total)
    above = sum(sizes[name] for name in select(sizes, target))
    below = total - sum(sizes[name] for name in select(sizes, total - target))
    return above if above - target_bytes <= target_bytes - below else below


def _choices(program: Program, solution: Solution) -> dict[int, float]:
    """The integer columns as the solution has them."""
    held: dict[int, float] = {}
    for block, option, early in zip(program.choices, solution.options, solution.early):
        for key, terms in block.columns.items():
            held |= dict.fromkeys(terms, float(key == (option, early)))
    for value in program.leaving:
        held |= dict.fromkeys(value.column, float(value.name in solution.offloaded_values))
    return held
