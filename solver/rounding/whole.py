"""The program in whole tensors: the total of each of a group's flows is the sum of some of its tensors.

The steps in which these move stay free, in fractions. So the program is only a little larger, and rounding its answer
costs time only. Identical tensors of a group are counted, not distinguished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from ..linear import ONE, Builder, LinearModel, Terms, add
from ..problem import Group, Problem, TensorSize
from ..program.columns import GroupColumns, mark
from ..program.model import Program
from ..program.spans import around
from ..resources import HOST

COUNTED = 350  # most columns of whole tensors with which the program is still solved in seconds


class Alike(NamedTuple):
    """The common figures of identical tensors: bytes of compute copy, gradient and state, and the state's pieces."""

    param_bytes: int
    grad_bytes: int
    state_bytes: int
    pieces: int


class _Wait(NamedTuple):
    """The seconds that the steps from the first to the last of `steps` take at least if tensors of a kind do something.

    The seconds are for all tensors of the kind; if only some of them do it, the wait counts in part.
    """

    label: str
    steps: tuple[int, int]
    seconds: float
    number: Terms


def in_whole_tensors(problem: Problem, program: Program, long_s: float, *, whole_states: bool = False) -> LinearModel:
    """Return the program's model with an integer column per part of a group and kind of its tensors.

    Parameters
    ----------
    problem: one with planned updates. program: that of the problem, with time as its goal.
    long_s: a tensor that takes longer than this to leave, be updated and return gets a row that says that it does so in
        sequence; infinite for none.
    whole_states: whether the states that leave are whole tensors', too, and not pieces of them, unless they may leave
        to files: RAM then does not reserve whole states.

    Returns: the model; its first columns are the program's.
    """
    model = program.model
    builder = Builder(list(model.names), list(model.upper), list(model.integer), list(model.rows))
    uncut = whole_states and not any(tier.for_states for tier in problem.state_tiers)
    for group in map(_uncut, problem.groups) if uncut else problem.groups:
        columns = program.groups[group.name]
        if not group.trainable:
            for away in columns.away:
                label = f"d[{group.name}{mark(away.path)},{away.stay.after}]"
                _counted(builder, label, group, away.part, _PARAM)
            continue
        host, states = _trainable(builder, group, columns)
        for wait in (*_host_waits(problem, group, host), *_state_waits(problem, group, states)):
            if wait.seconds > long_s:
                _lasts(builder, problem, program, wait)
    return builder.freeze(dict(enumerate(model.costs)))


def _lasts(builder: Builder, problem: Problem, program: Program, wait: _Wait) -> None:
    most = builder.upper[next(iter(wait.number))]
    spent = [(-float(problem.times(t)), program.time[t]) for t in around(*wait.steps, problem.n_steps)]
    unit = wait.seconds / program.time_unit_s / most
    builder.at_most_zero(f"whole {wait.label} lasts", add((unit, wait.number), *spent))


def counts(problem: Problem) -> int:
    """Return the most columns that `in_whole_tensors` adds."""
    return sum(len(_kinds(group)) * (5 + len(group.uses)) for group in problem.groups)


_PARAM, _GRAD, _STATE = 0, 1, 2
_FINE = 4  # from this many pieces on, the number of them that move need not be an integer


def _trainable(
    builder: Builder, group: Group, columns: GroupColumns
) -> tuple[Mapping[Alike, Terms], Mapping[Alike, Terms]]:
    """State whole tensors for all flows of a group; return the numbers updated on the host, and whose states leave."""
    name = group.name
    host = _counted(builder, f"x[{name}]", group, columns.cpu_part, _PARAM)
    leaves = add(*((1.0, trip.out.total) for trip in columns.states))
    states = leaves and _counted(builder, f"S[{name}]", group, leaves, _STATE)
    sent = {
        one.path: [
            _counted(builder, f"{letter}[{name}{mark(one.path)}]", group, flow.total, _PARAM)
            for letter, flow in (("D", one.drop), ("K", one.keep))
        ]
        for one in columns.departures
    }
    waits = columns.wait and _counted(builder, f"G[{name}]", group, columns.wait.out.total, _GRAD)
    away = [
        (a.path, _counted(builder, f"d[{name}{mark(a.path)},{a.stay.after}]", group, a.part, _PARAM))
        for a in columns.away
    ]
    for kind, number in _kinds(group).items():
        on_host, copies = host[kind], {path: [one[kind] for one in both] for path, both in sent.items()}
        whole: Terms = {ONE: float(number)}
        if states:
            leaving = add((1.0 / kind.pieces, states[kind]), (1.0, on_host), (-1.0, whole))
            builder.at_most_zero(f"whole states[{name}]", leaving)
        if waits:
            builder.at_most_zero(f"whole gradients[{name}]", add((1.0, waits[kind]), (1.0, on_host), (-1.0, whole)))
        if copies:
            everywhere = ((1.0, one) for both in copies.values() for one in both)
            builder.at_most_zero(f"whole copies[{name}]", add((1.0, on_host), *everywhere, (-1.0, whole)))
        for path, part in away:
            there = [(1.0, on_host)] if path.tier == HOST else []
            hosted = add(*there, *((1.0, one) for one in copies.get(path, ())))
            builder.at_most_zero(f"whole gap[{name}]", add((1.0, part[kind]), (-1.0, hosted)))
    return host, states or {}


def _host_waits(problem: Problem, group: Group, host: Mapping[Alike, Terms]) -> Iterator[_Wait]:
    """Yield the wait of a whole tensor between two uses: its gradient goes out, is used, and its values come in."""
    steps, host_path = (problem.first_update(group), group.uses[0] - 1), problem.rates.host
    for (param, grad, *_), count in host.items():
        seconds = group.cpu_update_s * grad / max(group.grad_bytes, 1) + problem.rates.copy_s(
            param, problem.rates.host.into
        )
        if not problem.gate or problem.speculates:
            seconds += problem.rates.copy_s(grad, host_path.out)
        yield _Wait(f"host[{group.name}]", steps, seconds, count)


def _state_waits(problem: Problem, group: Group, states: Mapping[Alike, Terms]) -> Iterator[_Wait]:
    """Yield the wait of a piece of a state: it goes out after its update and comes in before the next one."""
    updated = problem.device_update(group)
    for (_, _, state, pieces), count in states.items():
        piece = state / pieces
        seconds = sum(problem.rates.copy_s(piece, link) for link in problem.rates.host.links)
        yield _Wait(f"states[{group.name}]", (updated, updated - 1), seconds, count)


def _counted(builder: Builder, label: str, group: Group, part: Terms, what: int) -> Mapping[Alike, Terms]:
    """State that a fraction of a group consists of whole tensors or pieces of states; return their numbers by kind."""
    found: dict[Alike, Terms] = {}
    total = sum(kind[what] * number for kind, number in _kinds(group).items())
    for i, (kind, number) in enumerate(_kinds(group).items()):
        found[kind] = builder.column(
            f"whole {label}[{i}]", float(number * _cut(kind, what)), integer=_cut(kind, what) < _FINE
        )
    made = ((-kind[what] / _cut(kind, what) / max(total, 1), column) for kind, column in found.items())
    builder.at_most_zero(f"whole {label}", add((1.0, part), *made), equal=True)
    return found


def _cut(kind: Alike, what: int) -> int:
    """Return the number of pieces in which a tensor moves."""
    return kind.pieces if what == _STATE else 1


def _uncut(group: Group) -> Group:
    return replace(group, tensors=tuple(replace(tensor, rows=1, piece_rows=1) for tensor in group.tensors))


def _kinds(group: Group) -> Counter[Alike]:
    return Counter(_alike(tensor) for tensor in group.tensors)


def _alike(tensor: TensorSize) -> Alike:
    return Alike(tensor.param_bytes, tensor.grad_bytes, tensor.state_bytes, len(tensor.pieces))
