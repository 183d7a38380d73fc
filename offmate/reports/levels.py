"""What is on the device by kind of bytes, as actions bring it, make it and let it go."""

from __future__ import annotations

from ..solver.schedule import Action, Kind, Schedule
from .items import KINDS, kind_of


class Levels:
    """Bytes per kind of `KINDS`; `begin` and `end` of each action change them, as `memory_highs` counts."""

    def __init__(self, schedule: Schedule, fixed_bytes: int) -> None:
        self._schedule = schedule
        self._bytes = dict.fromkeys(KINDS, 0) | {"fixed": fixed_bytes}
        self._totals: set[str] = set()
        for item in schedule.resident:
            self._add(item)

    def begin(self, action: Action) -> None:
        """What is there as soon as an action starts."""
        if action.kind is Kind.PREFETCH:
            self._add(action.name)

    def end(self, action: Action) -> None:
        """What has come and gone when an action ends."""
        if action.kind is Kind.FREE:
            self._add(action.name, -1)
            self._totals.discard(action.name.removeprefix("t:"))
        elif action.kind is Kind.ACCUMULATE:
            # The first gradient becomes the total: both are of one kind, and nothing comes or goes.
            if action.name in self._totals:
                self._add(f"g:{action.name}", -1)
            self._totals.add(action.name)
        elif action.kind is Kind.COMPUTE:
            spec = self._schedule.computes[action.name]
            for item in spec.makes:
                self._add(item)
            for item in spec.drops:
                self._add(item, -1)

    def bytes(self, workspace_bytes: int = 0) -> tuple[int, ...]:
        """Bytes in the order of `KINDS`, with what a running compute holds on top."""
        return tuple((self._bytes | {"workspace": workspace_bytes}).values())

    def bytes_of(self, total_bytes: int) -> tuple[int, ...]:
        """Bytes in the order of `KINDS` where so many were seen: what no item accounts for is workspace."""
        beyond = total_bytes - sum(self._bytes.values())
        kind = "workspace" if beyond >= 0 else "activations"
        return tuple((self._bytes | {kind: self._bytes[kind] + beyond}).values())

    def _add(self, item: str, sign: int = 1) -> None:
        self._bytes[kind_of(item)] += sign * self._schedule.item_bytes[item]
