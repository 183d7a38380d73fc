"""The steps between a group's uses, and those in which the program lets it move."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ..problem import Group, Problem

EVERY = 3  # offsets below this one are all allowed,
SHORT = 12  # and so are all offsets of a span this short,
FEW = 40  # and all offsets of a problem with this few steps, whose program stays small anyway


@dataclass(frozen=True)
class Span:
    """The cycle of a group: the idle gap between its last gradient (or use) and its first use, and the other gaps.

    Parameters
    ----------
    first, end: f_w; g_w (for a frozen group its last use).
    idle: g_w .. f_w - 1 in cyclic order, g_w included.
    points: steps of the first pass in which the whole compute copy is on the device, ascending: uses and the last
        gradient.
    between: the gaps within an iteration.
    """

    first: int
    end: int
    idle: tuple[int, ...]
    points: tuple[int, ...]
    between: tuple[Stay, ...]


@dataclass(frozen=True)
class Stay:
    """A gap between two uses, in steps `after` and `before`; it recurs at each of `shifts` (0 first), in steps."""

    after: int
    before: int
    shifts: tuple[int, ...] = (0,)


def around(first: int, last: int, n_steps: int) -> tuple[int, ...]:
    """Return the steps from `first` to `last`, both included, going round the cycle; never empty."""
    return tuple((first + i) % n_steps for i in range((last - first) % n_steps + 1))


def span_of(problem: Problem, group: Group) -> Span:
    """Return the gaps of a group."""
    points = tuple(sorted({*group.uses, *group.grad_steps[-1:]}))
    first, end = points[0], points[-1] + problem.passes[-1]
    within = [Stay(after, before, problem.passes) for after, before in pairwise(points)]
    crossing = [Stay(points[-1], first + problem.pass_steps, problem.passes[:-1])] if problem.n_passes > 1 else []
    return Span(first, end, around(end, first - 1, problem.n_steps), points, (*within, *crossing))


def sparse_offsets(n: int, n_steps: int) -> list[int]:
    """List offsets below `n`: all of the first EVERY, then at growing distances; all if the problem has few steps.

    A copy is best made soon after a step or shortly before one. Further away, one of several neighbouring steps is
    enough: each group has its own steps, so together the groups still use them all. benchmarks/solver_scaling.py
    measures the cost relative to the program with every step allowed.
    """
    if n <= SHORT or n_steps <= FEW:
        return list(range(n))
    offsets, k = [], 0
    while k < n:
        offsets.append(k)
        k += 1 if k < EVERY else k
    return offsets


def leaving_steps(problem: Problem, span: tuple[int, ...], skip_last: int = 0) -> tuple[int, ...]:
    """Return the steps of a gap in which a flow may leave, dense at its start."""
    return tuple(span[k] for k in sparse_offsets(len(span) - skip_last, problem.n_steps))


def coming_steps(problem: Problem, span: tuple[int, ...], skip_first: int = 0) -> tuple[int, ...]:
    """Return the steps of a gap in which a flow may come in, dense at its end."""
    return tuple(span[-1 - k] for k in reversed(sparse_offsets(len(span) - skip_first, problem.n_steps)))


def updating_steps(problem: Problem, group: Group, span: tuple[int, ...]) -> tuple[int, ...]:
    """Return the steps of a gap in which the host may update a group, dense at its ends and around a gate."""
    logged = sum(problem.is_logged(group, step) for step in span)
    return tuple(step for part in (span[:logged], span[logged:]) if part for step in _dense_at_ends(problem, part))


def _dense_at_ends(problem: Problem, span: tuple[int, ...]) -> tuple[int, ...]:
    half = sparse_offsets((len(span) + 1) // 2, problem.n_steps)
    places = {*half, *(len(span) - 1 - k for k in half)}
    return tuple(span[k] for k in sorted(places))
