"""What a device holds of a model during an iteration, and what is under way to and from it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch

from ...solver.items import Item
from ..events import Event


@dataclass
class Buffer:
    """Device tensors of one item and the event after which they may be read. A buffer and its event travel together."""

    tensors: dict[str, torch.Tensor]
    arrived: Event | None = None
    leaving: Event | None = None

    def read(self) -> torch.Tensor:
        """Its first tensor, for what is launched from now on."""
        if self.arrived is not None:
            self.arrived.wait()
            self.arrived = None
        return next(iter(self.tensors.values()))

    def settle(self) -> None:
        """What is launched from now on comes after the copies that read or write it."""
        for event in (self.arrived, self.leaving):
            if event is not None:
                event.wait()

    def synchronize(self) -> None:
        """Wait for the copies that read or write it."""
        for event in (self.arrived, self.leaving):
            if event is not None:
                event.synchronize()


@dataclass
class Saved:
    """What a block's forward left for its backward: registers by number, bytes by storage."""

    registers: dict[int, torch.Tensor] = field(default_factory=dict)
    storage_bytes: dict[int, int] = field(default_factory=dict)


@dataclass
class Contents:
    """What is on the device and under way; changed on the executor's thread only, workers fill what they were given.

    Parameters
    ----------
    params, values: buffers by tensor name. states: by item. model_buffers: the model's own buffers by name.
    shared, outputs: tensors by value name.
    grads: gradients by "param:NAME" or "value:NAME". saved: by block.
    newer: items of parameters and states whose device copy is newer than the host's. newer_buffers: likewise, the
        model's buffers by name.
    on_tiers: tensors by item of states that wait on a tier beside the host.
    states_at_home: by parameter, its state as the host had it before the device updated it; scalars stay on the device.
    updated_rows: by parameter whose update on the device was cut short, so many of its first rows have had it.
    written: by item the event after which its host copy may be read.
    pending: parameters whose gradient is there and whose update has not been started.
    grad_leaving, grad_adding: by parameter, its gradient's way to the host, and its addition to the total there.
    grad_copied: likewise, the event after which the device's copy of it may be let go.
    totals: by parameter, the sum of its gradients so far, where it is kept on the device.
    views: how tensors view the storages that have left.
    returned: outputs by item, on a device with an allocator of its own: memory that the user lets go of sooner than the
        schedule has it would be cut up in another way than was rehearsed.
    """

    params: dict[str, Buffer] = field(default_factory=dict)
    states: dict[Item, Buffer] = field(default_factory=dict)
    model_buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Buffer] = field(default_factory=dict)
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, Saved] = field(default_factory=dict)
    newer: set[Item] = field(default_factory=set)
    newer_buffers: set[str] = field(default_factory=set)
    on_tiers: dict[Item, dict[str, torch.Tensor]] = field(default_factory=dict)
    states_at_home: dict[str, dict[str, object]] = field(default_factory=dict)
    updated_rows: dict[str, int] = field(default_factory=dict)
    written: dict[Item, Event] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    grad_leaving: dict[str, Event] = field(default_factory=dict)
    grad_adding: dict[str, Event] = field(default_factory=dict)
    grad_copied: dict[str, Event] = field(default_factory=dict)
    totals: dict[str, Buffer] = field(default_factory=dict)
    views: dict[Item, dict[str, torch.Tensor]] = field(default_factory=dict)
    returned: dict[Item, torch.Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Nothing is on the device or under way any more."""
        for part in fields(self):
            getattr(self, part.name).clear()


def is_bulk(value: object) -> bool:
    """Whether a part of an optimizer's state is a tensor worth moving; scalars stay where they are."""
    return isinstance(value, torch.Tensor) and value.dim() > 0
