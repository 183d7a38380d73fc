"""Pieces of states that stay on the device after all, in bytes that rounding has spared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..decisions import StateStay, TensorPlan, cycle
from ..problem import Problem
from ..resources import HOST

_SOON = 2  # steps after its update in which a state leaves to RAM, and one more before the next until which it is there


def keep(problem: Problem, plans: Iterable[TensorPlan], spare: Sequence[float]) -> dict[str, TensorPlan]:
    """Let pieces of states stay where there is room, those first that would be away for the fewest steps.

    A piece leaves in full, even where a few steps need a part of its bytes. All groups together spare that room. There
    is more of it if what leaves to RAM, over the fast link, is away for as long as it can be.

    Parameters
    ----------
    spare: by step, the bytes of the device that the plans leave to it.

    Returns: the plans by tensor.
    """
    sizes = {tensor.name: tensor for group in problem.groups for tensor in group.tensors}
    found, room = {}, list(spare)
    for plan in plans:
        found[plan.name] = replace(plan, states=tuple(_longer(problem, plan, stay) for stay in plan.states))
        for stays, sign in ((plan.states, -1), (found[plan.name].states, 1)):
            for stay in stays:
                _add(room, _away(problem, stay), sign * sizes[plan.name].piece_bytes(stay.rows))
    away = [(_away(problem, stay), name, stay) for name, plan in found.items() for stay in plan.states]
    for steps, name, stay in sorted(away, key=lambda entry: (len(entry[0]), entry[1], entry[2].rows)):
        size = sizes[name].piece_bytes(stay.rows)
        if all(room[step] >= size for step in steps):
            _add(room, steps, -size)
            found[name] = replace(found[name], states=tuple(other for other in found[name].states if other != stay))
    return found


def _longer(problem: Problem, plan: TensorPlan, stay: StateStay) -> StateStay:
    """Let a piece leave to RAM soon after its update, and return shortly before the next one."""
    updated, n_steps = plan.device_update, problem.n_steps
    if updated is None or stay.tier != HOST:
        return stay
    out, back = (updated + _SOON) % n_steps, (updated - _SOON - 1) % n_steps
    if (stay.out - updated) % n_steps <= _SOON or problem.in_middle(out):
        out = stay.out
    if (updated - stay.back) % n_steps <= _SOON + 1 or problem.in_middle(back):
        back = stay.back
    return replace(stay, out=out, back=back)


def _away(problem: Problem, stay: StateStay) -> list[int]:
    """List the steps in which a piece is off the device."""
    n_steps = problem.n_steps
    return cycle((stay.out + 1) % n_steps, (stay.back - 1) % n_steps, n_steps)


def _add(room: list[float], steps: Iterable[int], size_bytes: int) -> None:
    for step in steps:
        room[step] += size_bytes
