"""The tier that each whole item leaves to, chosen so that bytes by tier follow the fractions."""

from __future__ import annotations

from collections.abc import Mapping

from ..resources import HOST


class Spread:
    """Greedy error diffusion: each item goes to the tier that is furthest behind its share of all bytes so far.

    State: `_behind`, by tier, the bytes that it should have received minus those that it did.
    """

    def __init__(self) -> None:
        self._behind: dict[str, float] = {}

    def take(self, size_bytes: int, parts: Mapping[str, float]) -> str:
        """Choose the tier of the next item.

        Parameters
        ----------
        parts: by tier, the part of it that the fractions send there; empty if all goes to the host.
        """
        parts = parts or {HOST: 1.0}
        for tier, part in parts.items():
            self._behind[tier] = self._behind.get(tier, 0.0) + part * size_bytes
        chosen = max((tier for tier, part in parts.items() if part > 0), key=lambda tier: self._behind[tier])
        self._behind[chosen] -= size_bytes
        return chosen
