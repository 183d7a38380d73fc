"""Host memory that items share which are there at different times, each at the place that the schedule gives it."""

from __future__ import annotations

import torch

from ...solver.items import Item
from ...solver.schedule import Schedule
from ..devices.device import Device
from ..events import Event


class SharedHost:
    """Gives items their places, and the events after which these are free.

    A place serves whoever the schedule says. If it is still in use, since an iteration is ended in another way than
    planned, an item gets memory of its own.

    State: `_memory`, taken when the first item needs a place; `_held`, the items whose values there are still needed;
    `_freed`, by item, the event after which its place may be written again.
    """

    def __init__(self, schedule: Schedule, device: Device) -> None:
        self._layout, self._device = schedule.host_layout, device
        self._memory: torch.Tensor | None = None
        self._held: set[Item] = set()
        self._freed: dict[Item, Event] = {}

    @property
    def bytes(self) -> int:
        """The bytes of the memory that is taken."""
        return 0 if self._memory is None else self._memory.nbytes

    def has_place(self, item: Item) -> bool:
        """Return whether an item shares memory with others."""
        return item in self._layout.places

    def take(self, item: Item, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the memory at an item's place for its parts, side by side.

        Parameters
        ----------
        parts: tensors of these shapes, strides and dtypes, whose bytes together are the item's.
        """
        if item in self._held or any(other in self._held for other in self._layout.neighbours[item]):
            return {key: self._device.empty_host_like(like) for key, like in parts.items()}
        self._held.add(item)
        self._freed.pop(item, None)
        if self._memory is None:
            whole = torch.empty(self._layout.shared_bytes, dtype=torch.uint8, device="meta")
            self._memory = self._device.empty_host_like(whole)
        start, end = self._layout.places[item]
        found = {}
        for key, like in parts.items():
            span = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride())) if like.numel() else 0
            until = start + span * like.element_size()
            if until > end:
                raise ValueError(f"{item} takes more than the {end - self._layout.places[item][0]} bytes of its place")
            found[key] = _at(self._memory, start, like)
            start = until
        return found

    def free_after(self, item: Item) -> tuple[Event, ...]:
        """Return the events after which an item's place may be written: the last uses of others that had it."""
        events = (self._freed.get(other) for other in self._layout.neighbours.get(item, ()))
        return tuple(event for event in events if event is not None and not event.done())

    def freed(self, item: Item, event: Event | None) -> None:
        """Note that an item's values are needed no more, once an event has happened."""
        if item in self._held:
            self._held.discard(item)
            if event is not None:
                self._freed[item] = event

    def clear(self) -> None:
        """Free the memory; nothing may be under way. Tensors that still view it keep it."""
        self._memory = None
        self._held.clear()
        self._freed.clear()


def _at(memory: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    view = torch.empty(0, dtype=like.dtype)
    first = memory.storage_offset() + start
    return view.set_(memory.untyped_storage(), first // like.element_size(), like.shape, like.stride())
