"""What is on the device by kind of bytes, as actions bring it, make it and let it go."""

from __future__ import annotations

from ..solver.effects import effect
from ..solver.items import Item
from ..solver.schedule import Action, Kind, Schedule
from .items import KINDS


class Levels:
    """Bytes per kind of `KINDS`; `begin` and `end` of each action change them, as `memory_highs` counts."""

    def __init__(self, schedule: Schedule, fixed_bytes: int) -> None:
        self._schedule = schedule
        self._bytes = dict.fromkeys(KINDS, 0) | {"fixed": fixed_bytes}
        for item in schedule.resident:
            self._add(item)

    def begin(self, action: Action) -> None:
        """What is there as soon as an action starts."""
        if action.kind is Kind.PREFETCH:
            self._add(action.item)

    def end(self, action: Action) -> None:
        """What has come and gone when an action ends."""
        does = effect(action, self._schedule)
        for item in does.brings if action.kind is not Kind.PREFETCH else ():
            self._add(item)
        for item in does.releases:
            self._add(item, -1)

    def bytes(self, workspace_bytes: int = 0) -> tuple[int, ...]:
        """Bytes in the order of `KINDS`, with what a running compute holds on top."""
        return tuple((self._bytes | {"workspace": workspace_bytes}).values())

    def bytes_of(self, total_bytes: int) -> tuple[int, ...]:
        """Bytes in the order of `KINDS` where so many were seen: what no item accounts for is workspace."""
        beyond = total_bytes - sum(self._bytes.values())
        kind = "workspace" if beyond >= 0 else "activations"
        return tuple((self._bytes | {kind: self._bytes[kind] + beyond}).values())

    def _add(self, item: Item, sign: int = 1) -> None:
        self._bytes[item.kind.bytes_kind] += sign * self._schedule.item_bytes[item]
