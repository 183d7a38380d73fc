"""Search for a program's best point: relaxation, then rounding of the choices near it, and only then branch and bound.

The relaxation of these programs is tight, since a chain has many blocks and each choice is a small part of the whole.
So integer choices that stay near its fractions, with all flows solved again for them, are mostly within a fraction of a
percent of the bound. They take two or three linear programs instead of a tree of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from ..answer import RawAnswer
from ..backends import Backend
from ..linear import evaluate, fixed, relaxed
from ..problem import Option, Problem
from ..solution import Status
from .model import Program

BRANCH_S = 0.5  # branch and bound does not start with less time left than this
_SUPPORT = 1e-3  # an option below this fraction does not count as near the relaxation


def search(problem: Problem, program: Program, backend: Backend, time_limit_s: float, gap: float) -> RawAnswer:
    """Return the best point of `program` found within the time limit, with the best bound.

    Parameters
    ----------
    time_limit_s: limit on the whole search. gap: relative gap to the bound at which it may end.

    Returns: the answer in the program's own units; its status says whether the gap was reached.
    """
    started = time.perf_counter()

    def left_s() -> float:
        return time_limit_s - (time.perf_counter() - started)

    model = program.model
    relaxation = backend.solve(relaxed(model), time_limit_s, gap, vertex=False)
    if relaxation.status is not Status.OPTIMAL:  # an unfinished relaxation gives no plan
        return replace(relaxation, status=_without_point(relaxation.status), values=(), lower_bound=-inf)
    best = RawAnswer(Status.NO_ANSWER, (), inf, relaxation.lower_bound, 0.0)
    for whole_choices in (nearest_sums, most_used):
        chosen = whole_choices(problem, program, relaxation.values)
        found = _near(program, chosen, backend, max(left_s(), 0.0), gap)
        if found.objective < best.objective:
            best = replace(found, lower_bound=min(relaxation.lower_bound, found.objective))
        if _within(best, gap) or left_s() < BRANCH_S:
            break
    if not _within(best, gap) and left_s() > BRANCH_S:
        branched = backend.solve(model, left_s(), gap, best.values)
        bound = max(relaxation.lower_bound, branched.lower_bound)
        if branched.status is Status.INFEASIBLE or branched.objective < best.objective:
            best = branched
        if best.values:
            best = replace(best, lower_bound=min(bound, best.objective))
    reached = Status.OPTIMAL if _within(best, gap) else Status.TIME_LIMIT
    status = reached if best.values else _without_point(best.status)
    return replace(best, status=status, solve_s=time.perf_counter() - started)


def _without_point(status: Status) -> Status:
    return Status.INFEASIBLE if status is Status.INFEASIBLE else Status.NO_ANSWER


def _within(answer: RawAnswer, gap: float) -> bool:
    return bool(answer.values) and answer.objective - answer.lower_bound <= gap * abs(answer.objective)


def _near(
    program: Program, chosen: Mapping[int, float], backend: Backend, time_limit_s: float, gap: float
) -> RawAnswer:
    """Solve for the best flows under fixed choices; infinite objective if these do not fit."""
    model, kept = fixed(program.model, chosen)
    answer = backend.solve(model, time_limit_s, gap)
    if not answer.values:
        return replace(answer, objective=inf)
    found = {**chosen, **dict(zip(kept, answer.values))}
    values = tuple(found[c] for c in range(len(program.model.upper)))
    objective = sum(cost * value for cost, value in zip(program.model.costs, values))
    return replace(answer, values=values, objective=objective)


def nearest_sums(problem: Problem, program: Program, values: Sequence[float]) -> dict[int, float]:
    """Round every integer column to 0 or 1 by error diffusion: sums along the chain follow the fractions.

    Of the options that the fractions use, each block takes the one with which the bytes saved, seconds and copies of
    all blocks so far are nearest to the fractions'. A surplus of bytes weighs most, since it must be made up elsewhere.
    """
    path = problem.rates.host
    link = sum(map(path.bytes_per_s, path.links)) / len(path.links)
    chosen = _leaving(program, values)
    ahead = (0.0, 0.0, 0.0)  # use by the chosen options so far, minus use by the fractions
    for i, part in enumerate(_parts(program, values)):
        uses = {o: _uses(problem.blocks[i].options[o], link) for o in part}
        mean = [sum(part[o] * use[k] for o, use in uses.items()) for k in range(3)]
        then = {
            o: (ahead[0] + u[0] - mean[0], ahead[1] + u[1] - mean[1], ahead[2] + u[2] - mean[2])
            for o, u in uses.items()
        }
        near = {o: then[o] for o in part if part[o] > _SUPPORT} or then
        best = min(near, key=lambda o, near=near: _distance(*near[o]))  # type: ignore[misc]
        ahead = then[best]
        chosen |= _only(program, i, best)
    return chosen


def most_used(problem: Problem, program: Program, values: Sequence[float]) -> dict[int, float]:
    """Set every integer column to 0 or 1: each block takes the option that the fractions use most.

    Only options with which all blocks so far save no more bytes than the fractions do are allowed. This suits a full
    device, on which the choices of `nearest_sums`, a few large copies among small ones, would have to wait for room.
    """
    chosen = _leaving(program, values)
    ahead = 0.0
    for i, part in enumerate(_parts(program, values)):
        saved = {o: problem.blocks[i].options[o].saved_bytes for o in part}
        then = {o: ahead + saved[o] - sum(part[k] * saved[k] for k in part) for o in part}
        most = _SUPPORT * problem.device_budget_bytes
        fits = [o for o in part if part[o] > _SUPPORT and then[o] <= most]
        best = max(fits, key=lambda o, part=part: part[o]) if fits else min(then, key=lambda o, then=then: then[o])  # type: ignore[misc]
        ahead = then[best]
        chosen |= _only(program, i, best)
    return chosen


def _parts(program: Program, values: Sequence[float]) -> Iterator[dict[int, float]]:
    """Yield, by block, the fraction of each of its options."""
    for block in program.choices:
        part = {o: evaluate(terms, tuple(values)) for o, terms in block.columns.items()}
        whole = sum(part.values())
        yield {o: one / whole for o, one in part.items()}


def _only(program: Program, block: int, option: int) -> dict[int, float]:
    return {c: float(o == option) for o, terms in program.choices[block].columns.items() for c in terms}


def _leaving(program: Program, values: Sequence[float]) -> dict[int, float]:
    """Choose the interface values that leave, by error diffusion: as many so far as the fractions say."""
    chosen: dict[int, float] = {}
    away: dict[str, float] = {}
    gone: set[str] = set()
    for value in program.leaving:
        away[value.tier] = away.get(value.tier, 0.0) + evaluate(value.column, tuple(values))
        leaves = away[value.tier] > 0.5 and value.name not in gone
        away[value.tier] -= leaves
        gone |= {value.name} if leaves else set()
        chosen |= dict.fromkeys(value.column, float(leaves))
    return chosen


def _uses(option: Option, link_bytes_per_s: float) -> tuple[float, float, float]:
    """Return the seconds to move the saved bytes, the seconds of compute, and the seconds of copies."""
    moved_s = (option.saved_bytes / link_bytes_per_s, option.offloaded_bytes / link_bytes_per_s)
    return moved_s[0], option.forward_s + option.backward_s, moved_s[1]


def _distance(saved_s: float, compute_s: float, copies_s: float) -> float:
    return abs(saved_s) + 30 * max(saved_s, 0.0) + max(compute_s, 0.0) + 2 * abs(copies_s)
