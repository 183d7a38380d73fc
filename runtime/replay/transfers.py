"""Prefetches, offloads and frees of a schedule, by the kind of the item."""

from __future__ import annotations

from collections.abc import Mapping

from ...solver.items import Item, ItemKind
from .handlers import Handler
from .world import World


class Transfers:
    """Delegates the moves of an item to its handler, and counts its bytes.

    Parameters
    ----------
    handlers: by kind of item.
    """

    def __init__(self, world: World, handlers: Mapping[ItemKind, Handler]) -> None:
        self._ledger, self._shapes, self._handlers = world.device.ledger, world.shapes, handlers
        self._contents = world.contents

    def prefetch(self, item: Item) -> None:
        """Allocate an item and start its copy to the device."""
        if self._is_missing(item):
            return
        self._ledger.add(item.kind.prefix, self._shapes.bytes_of(item))
        self._handlers[item.kind].bring(item)

    def offload(self, item: Item) -> None:
        """Start an item's copy to the host or another tier."""
        if not self._is_missing(item):
            self._handlers[item.kind].send(item)

    def free(self, item: Item) -> None:
        """Release an item, after the copies that read it; if one failed the item stays."""
        if self._is_missing(item):
            return
        self._handlers[item.kind].release(item)
        self._ledger.remove(item.kind.prefix, self._shapes.freed_bytes(item))

    def _is_missing(self, item: Item) -> bool:
        """Return whether an item is the gradient of a micro-batch that is left out."""
        return item.kind is ItemKind.VALUE_GRADIENT and item.slot in self._contents.left_out

    def count(self, item: Item) -> None:
        """Count an item that is on the device already as if it had been brought."""
        self._ledger.add(item.kind.prefix, self._shapes.bytes_there(item))
