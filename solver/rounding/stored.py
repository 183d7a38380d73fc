"""The tensors that the host updates whose states lie in files: as much stays in RAM as the fractions have there."""

from __future__ import annotations

from ..decisions import TensorPlan
from ..problem import Group, Problem
from ..solution import GroupFlow, Solution
from .walk import NOISE

_LEAST = 1e-3  # part of a group's states; less in files than that is what solvers leave over


class Stored:
    """Chooses the states in RAM: of all groups so far, never more bytes than the fractions of the CPU parts.

    State: `_room`, the bytes of states that the fractions have in RAM beyond those of whole tensors.

    Parameters
    ----------
    tier: the one that has the others; None if all stay in RAM.
    """

    def __init__(self, tier: str | None) -> None:
        self._tier, self._room = tier, 0.0

    @staticmethod
    def of(problem: Problem, solution: Solution) -> Stored:
        """Return what chooses for a solution: a tier is used if the fractions use it."""
        tier = problem.host_update_tier
        used = any(flow.from_files > _LEAST for flow in solution.groups.values())
        return Stored(tier.name if tier is not None and used else None)

    @property
    def any(self) -> bool:
        """Whether any state lies in files."""
        return self._tier is not None

    def choose(self, problem: Problem, group: Group, flow: GroupFlow, plans: list[TensorPlan]) -> list[TensorPlan]:
        """Return the plans of a group with the tier that has each state that the host updates, the largest first."""
        if self._tier is None or not problem.may_update_from_files(group):
            return plans
        self._room += (flow.cpu_part - flow.from_files + NOISE) * group.state_bytes
        sizes = {tensor.name: tensor.state_bytes for tensor in group.tensors}
        stored = set()
        for plan in sorted((p for p in plans if p.cpu), key=lambda p: (-sizes[p.name], p.name)):
            if sizes[plan.name] <= self._room or not sizes[plan.name]:
                self._room -= sizes[plan.name]
            else:
                stored.add(plan.name)
        beside = problem.values_beside_states
        return [p.updated_from(self._tier, with_values=beside) if p.name in stored else p for p in plans]
