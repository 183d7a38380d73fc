"""Whole tensors near the fractions, with everything else solved again for them.

Rounding alone takes to the host at least what the fractions say, group by group: no step then needs more memory, but
the host and the links get more to do than the program counted. Here the groups' excesses even out, and the program
says what else must follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from .backends import default, get
from .knapsack import select
from .linear import fixed
from .model import Program, state_program
from .problem import Group, Problem
from .readback import read_solution
from .rounding_walk import NOISE
from .solution import Solution, Status


def settle(
    problem: Problem, solution: Solution, *, time_limit_s: float = 60.0, gap: float = 0.01, backend: str | None = None
) -> Iterator[Solution]:
    """The best flows for the solution's choices with whole tensors where it has fractions of groups.

    Parameters
    ----------
    solution: an answer to the problem, with a plan. time_limit_s, gap, backend: as in `solve`.

    Returns: first a solution in which every host part is made of whole tensors, then one in which what leaves of the
    states is, too; each one only if it fits.
    Raises: BackendError if the backend is not installed.
    """
    parts = whole_parts(problem, solution)
    settled = with_parts(problem, solution, parts, time_limit_s=time_limit_s, gap=gap, backend=backend)
    if settled is None:
        return
    yield settled
    states = whole_states(problem, settled)
    again = with_parts(problem, solution, parts, states, time_limit_s=time_limit_s, gap=gap, backend=backend)
    if again is not None:
        yield again


def with_parts(
    problem: Problem,
    solution: Solution,
    parts: Mapping[str, float],
    states: Mapping[str, float] | None = None,
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.01,
    backend: str | None = None,
) -> Solution | None:
    """The best flows for the solution's choices and given parts.

    Parameters
    ----------
    solution: an answer to the problem, with a plan. parts: by trainable group the fraction updated on the host.
    states: by trainable group the fraction whose states leave the device; as the program decides if None.

    Returns: a solution with the first one's bound; None if there is no plan with these parts.
    """
    program = state_program(problem)
    held = _choices(program, solution)
    for name, part in parts.items():
        held |= dict.fromkeys(program.groups[name].cpu_part, part)
    for name, part in (states or {}).items():
        leaving = program.groups[name].state_out
        held |= dict.fromkeys(leaving.total, part) if leaving is not None else {}
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
    for group in _in_order(problem):
        wanted = solution.groups[group.name].cpu_part * group.param_bytes
        chosen = _nearest(group, wanted - ahead)
        ahead += chosen - wanted
        parts[group.name] = chosen / group.param_bytes
    return parts


def whole_states(problem: Problem, settled: Solution) -> dict[str, float]:
    """By trainable group the fraction that whole states leaving the device make up.

    Parameters
    ----------
    settled: a solution with whole host parts.

    All groups so far together always send at least the fractions' bytes: what stays needs room all the time.
    """
    states: dict[str, float] = {}
    ahead = 0.0
    for group in _in_order(problem):
        flow = settled.groups[group.name]
        on_host = select({t.name: t.param_bytes for t in group.tensors}, round(flow.cpu_part * group.param_bytes))
        sizes = {t.name: t.state_bytes for t in group.tensors if t.name not in on_host}
        wanted = sum(flow.state_out.values()) * group.state_bytes
        target = min(round(wanted - ahead - NOISE * group.state_bytes), sum(sizes.values()))
        chosen = sum(sizes[name] for name in select(sizes, target))
        ahead += chosen - wanted
        states[group.name] = chosen / group.state_bytes if group.state_bytes else 0.0
    return states


def _in_order(problem: Problem) -> list[Group]:
    trainable = (group for group in problem.groups if group.trainable and group.param_bytes)
    return sorted(trainable, key=lambda g: (g.grad_steps[-1], g.name))


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
