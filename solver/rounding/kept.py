"""Pieces of states that stay on the device after all, in bytes that rounding has spared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..decisions import StateStay, TensorPlan, cycle
from ..problem import Problem


def keep(problem: Problem, plans: Iterable[TensorPlan], spare: Sequence[float]) -> dict[str, TensorPlan]:
    """Let pieces of states stay where there is room, those first that would be away for the fewest steps.

    A piece is as large as a few steps need it to be, and leaves in full for them. All groups together spare that room.

    Parameters
    ----------
    spare: by step, the bytes of the device that the plans leave to it.

    Returns: the plans by tensor.
    """
    found, room = {plan.name: plan for plan in plans}, list(spare)
    tensors = {tensor.name: tensor for group in problem.groups for tensor in group.tensors}
    away = {(name, stay): _away(problem, stay) for name, plan in found.items() for stay in plan.states}
    for (name, stay), steps in sorted(away.items(), key=lambda entry: (len(entry[1]), entry[0][0], entry[0][1].rows)):
        size = tensors[name].piece_bytes(stay.rows)
        if all(room[step] >= size for step in steps):
            for step in steps:
                room[step] -= size
            left = tuple(other for other in found[name].states if other != stay)
            found[name] = replace(found[name], states=left)
    return found


def _away(problem: Problem, stay: StateStay) -> list[int]:
    """List the steps in which a piece is off the device."""
    n_steps = problem.n_steps
    return cycle((stay.out + 1) % n_steps, (stay.back - 1) % n_steps, n_steps)
