"""The tier that each whole item leaves to, chosen so that bytes by tier follow the fractions."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem import Problem
from ..resources import HOST
from ..solution import Solution

_LEAST = 1e-3  # part of a group's states; less in files than that is what solvers leave over


class Spread:
    """Greedy error diffusion: each item goes to the tier that is furthest behind its share of all bytes so far.

    Further tiers are never given more than their room. What none of them has room for goes to the host, whose bytes are
    checked with everything else that it holds.

    State: `_behind`, by tier, the bytes that it should have received minus those that it did; `_room`, by further tier,
    the bytes left.

    Parameters
    ----------
    room: bytes left on each tier beside the host. in_pieces: whether each piece of a state has a tier of its own, since
        states have their homes in files. Otherwise a state has one place off the device, and all of its pieces leave to
        their rows there.
    """

    def __init__(self, room: Mapping[str, float], in_pieces: bool = False) -> None:
        self._behind: dict[str, float] = {}
        self._room = dict(room)
        self.in_pieces = in_pieces

    @staticmethod
    def of(problem: Problem, solution: Solution) -> Spread:
        """Spread what a solution sends away; interface values already have their tiers."""
        room = {tier.name: float(tier.capacity_bytes) for tier in problem.rates.tiers}
        for value in problem.values:
            tier = solution.value_tiers.get(value.name)
            if tier is not None:
                room[tier] -= value.bytes
        files = [tier.name for tier in problem.state_tiers if tier.for_states]
        flows = solution.groups.values()
        stored = (sum(flow.state_out.values()) * flow.state_tiers.get(name, 0.0) for flow in flows for name in files)
        return Spread(room, in_pieces=any(part > _LEAST for part in stored))

    def take(self, size_bytes: int, parts: Mapping[str, float]) -> str:
        """Choose the tier of the next item.

        Parameters
        ----------
        parts: by tier, the part of it that the fractions send there; empty if all goes to the host.
        """
        parts = parts or {HOST: 1.0}
        for tier, part in parts.items():
            self._behind[tier] = self._behind.get(tier, 0.0) + part * size_bytes
        fits = [tier for tier, part in parts.items() if part > 0 and self._room.get(tier, size_bytes) >= size_bytes]
        chosen = max(fits, key=lambda tier: self._behind[tier], default=HOST)
        self._behind[chosen] = self._behind.get(chosen, 0.0) - size_bytes
        if chosen in self._room:
            self._room[chosen] -= size_bytes
        return chosen
