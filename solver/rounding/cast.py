"""The tensors that the host updates of which RAM has float32 copies alone: as few as the fractions have, in bytes."""

from __future__ import annotations

from dataclasses import replace

from ..decisions import TensorPlan
from ..problem import Group, Problem
from ..resources import HOST
from ..solution import GroupFlow, Solution
from .walk import NOISE

_LEAST = 1e-3  # part of a group; less than that is what solvers leave over
_SMALL = 1 / 16  # of a group's largest tensor; smaller ones would take a copy more each, and spare next to nothing


def worth_casting(group: Group) -> dict[str, int]:
    """Return, by name, the bytes of a group's tensors that are not small."""
    largest = max(tensor.param_bytes for tensor in group.tensors)
    return {tensor.name: tensor.param_bytes for tensor in group.tensors if tensor.param_bytes > _SMALL * largest}


class Cast:
    """Chooses values in RAM: of all groups so far, never more bytes than the fractions of the CPU parts.

    State: `_room`, the bytes of values that the fractions have in RAM beyond those of whole tensors.

    Parameters
    ----------
    tier: the one that the others come from; None if all are in RAM.
    """

    def __init__(self, tier: str | None) -> None:
        self._tier, self._room = tier, 0.0

    @staticmethod
    def of(problem: Problem, solution: Solution) -> Cast:
        """Return what chooses for a solution: copies are cast if the fractions cast any."""
        tier = problem.cast_tier
        used = any(flow.cast > _LEAST for flow in solution.groups.values())
        return Cast(tier.name if tier is not None and used else None)

    def choose(self, problem: Problem, group: Group, flow: GroupFlow, plans: list[TensorPlan]) -> list[TensorPlan]:
        """Return the plans of a group with those that are cast: small values stay in RAM, and the largest that fit."""
        if self._tier is None or not problem.may_cast(group):
            return plans
        elsewhere = flow.cast + flow.from_files * problem.values_beside_states
        self._room += (flow.cpu_part - elsewhere + NOISE) * group.param_bytes
        sizes = {tensor.name: tensor.param_bytes for tensor in group.tensors}
        self._room -= sum(sizes[p.name] for p in plans if p.cpu and p.states_from is not None and p.source == HOST)
        worth, cast = worth_casting(group), set()
        for plan in sorted((p for p in plans if p.may_be_cast), key=lambda p: (-sizes[p.name], p.name)):
            if sizes[plan.name] <= self._room or plan.name not in worth:
                self._room -= sizes[plan.name]
            else:
                cast.add(plan.name)
        return [replace(p, source=self._tier) if p.name in cast else p for p in plans]
