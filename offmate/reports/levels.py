"""Bytes on the device by kind, as actions bring, make and release items."""

from __future__ import annotations

from ..solver.effects import effect
from ..solver.items import Item
from ..solver.schedule import Action, Kind, Schedule
from .items import KINDS


class Levels:
    """Bytes per kind of `KINDS`. `begin` and `end` of each action change them, counted as in `memory_highs`."""

    def __init__(self, schedule: Schedule, fixed_bytes: int) -> None:
        self._schedule = schedule
        self._bytes = dict.fromkeys(KINDS, 0) | {"fixed": fixed_bytes}
        for item in schedule.resident:
            self._add(item)

    def begin(self, action: Action) -> None:
        """Add the bytes that an action takes as soon as it starts."""
        if action.kind is Kind.PREFETCH:
            self._add(action.item)

    def end(self, action: Action) -> None:
        """Add the items that an action has brought by its end, and subtract those that it released."""
        does = effect(action, self._schedule)
        for item in does.brings if action.kind is not Kind.PREFETCH else ():
            self._add(item)
        for item in does.releases:
            self._add(item, -1)

    def bytes(self, workspace_bytes: int = 0) -> tuple[int, ...]:
        """Return bytes in the order of `KINDS`, with what a running compute holds on top."""
        return tuple((self._bytes | {"workspace": workspace_bytes}).values())

    def bytes_of(self, total_bytes: int) -> tuple[int, ...]:
        """Split a measured total in the order of `KINDS`: bytes that no item accounts for are workspace."""
        beyond = total_bytes - sum(self._bytes.values())
        kind = "workspace" if beyond >= 0 else "activations"
        return tuple((self._bytes | {kind: self._bytes[kind] + beyond}).values())

    def _add(self, item: Item, sign: int = 1) -> None:
        self._bytes[item.kind.bytes_kind] += sign * self._schedule.item_bytes[item]
