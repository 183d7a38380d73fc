"""Whole tensors near the fractions, with everything else solved again for them.

Rounding alone gives the host at least the fractions' bytes, group by group: no step then needs more device memory, but
the host and the links get more work than the program counted. Here the groups' excesses even out, and the program
decides the rest again. For a group that takes a large part of an iteration, both neighbouring whole parts are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf

from .. import items
from ..backends import default, get
from ..linear import LinearModel, fixed
from ..problem import Group, Problem
from ..program.model import Program, state_program
from ..program.readback import read_solution
from ..resources import HOST
from ..solution import Solution, Status
from .knapsack import select
from .walk import NOISE
from .whole import COUNTED, counts, in_whole_tensors

_LARGE = 0.1  # a group is large if its states or its update take this fraction of an iteration on a link or on the host
_SMALL = 0.02  # a piece is small if its copy takes less than this fraction of an iteration
_LONG = 0.2  # fraction of an iteration above which a whole tensor's way to the host and back gets a row
_NEAR = 0.03  # gap to which the program in whole tensors is solved
_TRIED = 3  # most large groups that are tried both ways


@dataclass(frozen=True)
class Parts:
    """By trainable group, the fraction updated on the host, and the fraction whose states leave the device."""

    host: Mapping[str, float] = field(default_factory=dict)
    states: Mapping[str, float] = field(default_factory=dict)


def settle(resolver: Resolver, near: Solution | None = None, *, host_is_full: bool = False) -> Iterator[Solution]:
    """Yield the best flows for a solution's choices, with whole tensors where `near` has fractions of groups.

    Parameters
    ----------
    resolver: of the problem and the solution. near: a solution with room to spare for whole tensors, to be taken where
        the resolver's has none; None for that one itself. host_is_full: whether states leave as whole tensors, since
        the host holds them so.

    Returns: first a solution in which every host part consists of whole tensors, then one in which the states that
    leave do, too; each one only if it fits.
    """
    problem = resolver.problem
    large, near = _settle_large(problem, resolver, near or resolver.solution, host_is_full)
    parts = Parts(whole_parts(problem, near, large.host), large.states)
    settled = resolver.solve(parts)
    if settled is None:  # a larger host part needs less device memory
        parts = Parts(whole_parts(problem, near, large.host, at_least=True), large.states)
        settled = resolver.solve(parts)
    if settled is None:
        return
    yield settled
    gone = whole_states(problem, settled, of_tensors=host_is_full)
    again = resolver.solve(Parts(parts.host, gone | dict(large.states)))
    if again is not None:
        yield again


def settle_whole(
    problem: Problem, solution: Solution, *, time_limit_s: float = 60.0, backend: str | None = None
) -> Solution | None:
    """Solve for flows, under the solution's choices, in which everything that moves consists of whole tensors.

    Parameters
    ----------
    solution, time_limit_s, backend: as in `Resolver`.

    Returns: a nearly optimal solution; None if there is none, or if the tensors are too many to solve for in a short
    time.
    Raises: BackendError if the backend is not installed.
    """
    if problem.update == "external" or counts(problem) > COUNTED:
        return None
    return Resolver(problem, solution, time_limit_s=time_limit_s, gap=_NEAR, backend=backend).solve_whole()


class Resolver:
    """Solves a problem again with a solution's choices and given parts; builds the program once, and keeps answers.

    Parameters
    ----------
    solution: an answer to the problem, with a plan. time_limit_s, gap, backend: as in `solve`.

    Raises: BackendError if the backend is not installed.
    """

    def __init__(
        self,
        problem: Problem,
        solution: Solution,
        *,
        time_limit_s: float = 60.0,
        gap: float = 0.01,
        backend: str | None = None,
    ) -> None:
        self.problem, self.solution = problem, solution
        self._program = state_program(problem)
        self._backend = get(backend) if backend else default()
        self._limits = (time_limit_s, gap)
        self._answers: dict[tuple[frozenset[tuple[str, float]], ...], Solution | None] = {}

    def solve(self, parts: Parts) -> Solution | None:
        """Solve for the best flows with these parts; the program decides the parts that are not given.

        Returns: a solution with the bound of the original one; None if there is no plan with these parts. The same
        parts give the same object.
        """
        key = frozenset(parts.host.items()), frozenset(parts.states.items())
        if key not in self._answers:
            self._answers[key] = self._solved(self._program.model, self._held(parts))
        return self._answers[key]

    def _held(self, parts: Parts) -> dict[int, float]:
        """Return the values of the columns that the solution's choices and some parts give."""
        program = self._program
        held = _choices(program, self.solution)
        for name, part in parts.host.items():
            held |= dict.fromkeys(program.groups[name].cpu_part, part)
        for name, part in parts.states.items():
            trips = program.groups[name].states
            if len(trips) == 1:  # with several tiers the program decides how much goes to each
                held |= dict.fromkeys(trips[0].out.total, part)
        return held

    def solve_whole(self) -> Solution | None:
        """Solve, at the root node of the search, for flows whose totals are made of whole tensors.

        Returns: as `solve`.
        """
        model = in_whole_tensors(self.problem, self._program, _LONG * self.solution.objective_s)
        held = _choices(self._program, self.solution)
        left, kept = fixed(model, held)
        answer = self._backend.solve(left, *self._limits, nodes=1)
        if not answer.values:
            return None
        # Solvers return integers with an error of up to a millionth.
        held |= {c: float(round(v)) for c, v in zip(kept, answer.values) if model.integer[c]}
        return self._solved(model, held)

    def solve_in_whole_tensors(self, numbers: Mapping[str, float]) -> Solution | None:
        """Solve for the best flows with the integer columns of the program in whole tensors held by name.

        Returns: as `solve`, with the choices that the columns make.
        """
        model = in_whole_tensors(self.problem, self._program, inf, whole_states=True)
        return self._solved(model, {c: numbers[name] for c, name in enumerate(model.names) if model.integer[c]})

    def _solved(self, model: LinearModel, held: dict[int, float]) -> Solution | None:
        """Solve with some columns held, in a model whose first columns are the program's."""
        left, kept = fixed(model, held)
        answer = self._backend.solve(left, *self._limits)
        if not answer.values:
            return None
        found = held | dict(zip(kept, answer.values))
        values = tuple(found[c] for c in range(len(self._program.model.upper)))
        settled = read_solution(self._program, replace(answer, values=values, status=Status.OPTIMAL))
        bound_s = min(self.solution.lower_bound_s, settled.objective_s)
        gap = (settled.objective_s - bound_s) / settled.objective_s if settled.objective_s > 0 else 0.0
        return replace(settled, status=self.solution.status, lower_bound_s=bound_s, gap=gap)


def _settle_large(problem: Problem, resolver: Resolver, near: Solution, host_is_full: bool) -> tuple[Parts, Solution]:
    """Choose whole parts for the large groups that a solution splits, one group at a time, the best near it."""
    parts = Parts()
    large = [group for group in _in_order(problem) if _weight(problem, group, near) > _LARGE]
    for group in sorted(large, key=lambda g: (-_weight(problem, g, near), g.name))[:_TRIED]:
        best: tuple[Parts, Solution] | None = None
        for host, states in _around(problem, group, near, host_is_full):
            tried = Parts({**parts.host, group.name: host}, {**parts.states, **states})
            found = resolver.solve(tried)
            if found is not None and found.objective_s < (best[1].objective_s if best else inf):
                best = tried, found
        parts, near = best or (parts, near)
    return parts, near


def _weight(problem: Problem, group: Group, solution: Solution) -> float:
    """Return the fraction of an iteration that a group's states take on a link, or its update on the host."""
    copy_s = _copy_s(problem, group.state_bytes, group.state_copies)
    return max(copy_s, group.cpu_update_s) / max(solution.objective_s, NOISE)


def _copy_s(problem: Problem, size_bytes: int, copies: int = 1) -> float:
    return max(problem.rates.copy_s(size_bytes, link, copies) for link in problem.rates.host.links)


def _around(
    problem: Problem, group: Group, near: Solution, host_is_full: bool
) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield the whole host parts next to a flow's, below and above, each with whole parts of states that may leave.

    States that leave in small pieces are left to the program.
    """
    flow = near.groups[group.name]
    for host_bytes in sorted({*_neighbours(_sizes(group), flow.cpu_part * group.param_bytes)}):
        host, rest = host_bytes / group.param_bytes, _device_states(group, host_bytes, host_is_full)
        if _copy_s(problem, max(rest.values(), default=0)) < _SMALL * near.objective_s:
            yield host, {}
            continue
        wanted = min(sum(flow.state_out.values()) * group.state_bytes, sum(rest.values()))
        for states in sorted({*_neighbours(rest, wanted), 0}):
            yield host, {group.name: states / max(group.state_bytes, 1)}


def whole_parts(
    problem: Problem, solution: Solution, settled: Mapping[str, float] | None = None, *, at_least: bool = False
) -> dict[str, float]:
    """Return, by trainable group, the fraction that whole tensors updated on the host make up, by error diffusion.

    In the order of their last gradients each group takes the tensors with which the bytes updated on the host of all
    groups so far are nearest to the fractions'.

    Parameters
    ----------
    settled: parts that are whole already. at_least: whether the groups so far together never have less than the
        fractions.
    """
    parts = dict(settled or {})
    ahead = 0.0
    for group in _in_order(problem):
        if group.name in parts:
            continue
        if group.side != "any":
            parts[group.name] = float(group.side == "host")
            continue
        wanted = solution.groups[group.name].cpu_part * group.param_bytes
        below, above = _neighbours(_sizes(group), wanted - ahead)
        nearer = above - (wanted - ahead) <= wanted - ahead - below
        chosen = above if nearer or at_least else below
        ahead += chosen - wanted
        parts[group.name] = chosen / group.param_bytes
    return parts


def whole_states(problem: Problem, settled: Solution, *, of_tensors: bool = False) -> dict[str, float]:
    """Return, by trainable group, the fraction that pieces of states leaving the device make up.

    In the order of their last gradients each group takes the fewest bytes with which all groups so far reach the
    fractions' bytes, since states that stay need room all the time.

    Parameters
    ----------
    settled: a solution with whole host parts.
    """
    gone: dict[str, float] = {}
    ahead = 0.0
    for group in _in_order(problem):
        flow = settled.groups[group.name]
        rest = _device_states(group, round(flow.cpu_part * group.param_bytes), of_tensors)
        total = sum(rest.values())
        wanted = min(sum(flow.state_out.values()) * group.state_bytes, total)
        least = min(max(0, ceil(wanted - ahead - NOISE * total)), total)
        chosen = sum(rest[piece] for piece in select(rest, least))
        ahead += chosen - wanted
        gone[group.name] = chosen / max(group.state_bytes, 1)
    return gone


def _in_order(problem: Problem) -> list[Group]:
    trainable = (group for group in problem.groups if group.trainable and group.param_bytes)
    return sorted(trainable, key=lambda g: (g.grad_steps[-1], g.name))


def _sizes(group: Group) -> dict[str, int]:
    return {tensor.name: tensor.param_bytes for tensor in group.tensors}


def _device_states(group: Group, host_bytes: int, of_tensors: bool = False) -> dict[str, int]:
    """Return the bytes, by piece, of the device part's states if the host updates that many bytes of parameters.

    Parameters
    ----------
    of_tensors: whether a tensor's state is one piece.
    """
    on_host = select(_sizes(group), host_bytes)
    rest = (t for t in group.tensors if t.name not in on_host)
    if of_tensors:
        return {items.state(t.name): t.state_bytes for t in rest}
    return {items.state(t.name, rows): t.piece_bytes(rows) for t in rest for rows in t.pieces}


def _neighbours(sizes: Mapping[str, int], target_bytes: float) -> tuple[int, int]:
    """Return the totals of the subsets nearest to a target, below and above."""
    total = sum(sizes.values())
    least = min(max(0, ceil(target_bytes - NOISE * total)), total)
    most = min(max(0, floor(target_bytes + NOISE * total)), total)
    above = sum(sizes[name] for name in select(sizes, least))
    return total - sum(sizes[name] for name in select(sizes, total - most)), above


def _choices(program: Program, solution: Solution) -> dict[int, float]:
    """Return the values of the integer columns in the solution."""
    held: dict[int, float] = {}
    for block, option in zip(program.choices, solution.options):
        for o, terms in block.columns.items():
            held |= dict.fromkeys(terms, float(o == option))
    for value in program.leaving:
        leaves = value.name in solution.offloaded_values and solution.value_tiers.get(value.name, HOST) == value.tier
        held |= dict.fromkeys(value.column, float(leaves))
    return held
