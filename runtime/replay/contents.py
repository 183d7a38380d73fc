"""The contents of a device during an iteration, and the copies under way.

Between iterations the host's values are current. While an iteration runs these invariants hold:

- An item in `Contents.newer` has current values on the device (or, if it is in `on_tiers`, on that tier). The host's
  may be older, or their copy may not have ended. An update on the device and the start of a copy to a tier add the
  item. A release after that copy, or a rescue to the host, removes it. A state on another tier than its home's, such
  as RAM for one at home in files, stays in it.
- `Contents.written` holds the last event that writes an item off the device: its copy there, or its update on the
  host. A copy back to the device, and a read on the host, must come after it.
- A parameter is in `Contents.pending` from the backward that makes its gradient until its update is started, on either
  side; if it is started before the gate, until the gate keeps it. With several micro-batches, those whose total is on
  the host are in `HostState.totals` instead, or as well.
- A copy that is yet to be launched, since it waits for the CPU, holds the addresses of its source and target. Neither
  may move or be freed before it is launched; after that the order of streams protects them. So the arena moves no
  tensor with such a copy, and every release or overwrite first waits for the copy (`Buffer.settle`, or its event's
  `wait`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch

from ...solver.items import Item
from ..events import Event


@dataclass
class Buffer:
    """The device tensors of one item, with the events of their copies: they may be read after `arrived`."""

    tensors: dict[str, torch.Tensor]
    arrived: Event | None = None
    leaving: Event | None = None

    def read(self) -> torch.Tensor:
        """Return its first tensor, ordered after its arrival for work launched from now on."""
        if self.arrived is not None:
            self.arrived.wait()
            self.arrived = None
        return next(iter(self.tensors.values()))

    def settle(self) -> None:
        """Order work launched from now on after the copies that read or write the tensors."""
        for event in (self.arrived, self.leaving):
            if event is not None:
                event.wait()

    def synchronize(self) -> None:
        """Block until the copies that read or write the tensors have ended."""
        for event in (self.arrived, self.leaving):
            if event is not None:
                event.synchronize()


@dataclass
class Saved:
    """The values that a block's forward leaves for its backward: registers by number, bytes by storage."""

    registers: dict[int, torch.Tensor] = field(default_factory=dict)
    storage_bytes: dict[int, int] = field(default_factory=dict)


@dataclass
class OfBatch:
    """What the device holds for one of the micro-batches for which steps run.

    Parameters
    ----------
    values: buffers by name. shared, outputs: tensors by value name. saved: by block.
    grads: gradients by "param:NAME" or "value:NAME". Those of parameters are partial ones, to which blocks still add;
        the first micro-batch's become the sums over all.
    """

    values: dict[str, Buffer] = field(default_factory=dict)
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, Saved] = field(default_factory=dict)


@dataclass
class Contents:
    """The items on the device and the copies under way; see the module's docstring for the invariants.

    Parameters
    ----------
    params: buffers by tensor name. states: buffers by item. model_buffers: the model's own buffers by name.
    batches: by slot, what belongs to a micro-batch of a step.
    newer: items of parameters and states with values that the host may lack. newer_buffers: names of such buffers of
        the model.
    on_tiers: by item of a state that left to another tier than its home's, its tensors there; until it is updated.
    states_at_home: by parameter, its state as the host had it before the device updated it; updated scalars stay on the
        device.
    updated_rows: by parameter whose update on the device was interrupted, the number of its first rows that were
        updated.
    written: by item, the event after which its copy off the device may be read.
    pending: parameters with a gradient whose update has not been started.
    grad_leaving, grad_adding: by parameter, the events of its gradient's copy to the host, and of its addition to the
        total there.
    grad_copied: by parameter, the event after which the gradient's memory on the device may be freed.
    totals: by parameter, the sum of its gradients so far, where it is kept on the device.
    returned_grads: by parameter, its whole gradient (or total), back from the host for its update on the device.
    left_out: slots of micro-batches whose backward() never came, so that they have no gradients.
    views: by item, the views that tensors have of storages that have left.
    returned: outputs by item, on a device with its own allocator. They are kept as long as the schedule keeps them,
        even if the user frees them sooner, since the memory would otherwise be reused in another way than was
        rehearsed.
    """

    params: dict[str, Buffer] = field(default_factory=dict)
    states: dict[Item, Buffer] = field(default_factory=dict)
    model_buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    batches: dict[int, OfBatch] = field(default_factory=dict)
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
    returned_grads: dict[str, Buffer] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    views: dict[Item, dict[str, torch.Tensor]] = field(default_factory=dict)
    returned: dict[Item, torch.Tensor] = field(default_factory=dict)

    def of(self, slot: int) -> OfBatch:
        """Return what belongs to a micro-batch of a step."""
        return self.batches.setdefault(slot, OfBatch())

    def buffers(self) -> Iterator[Buffer]:
        """Yield the buffers of parameters, states, values between blocks, and sums of gradients."""
        yield from self.params.values()
        yield from self.states.values()
        for batch in self.batches.values():
            yield from batch.values.values()
        yield from self.totals.values()

    @property
    def grads(self) -> dict[str, torch.Tensor]:
        """The gradients by "param:NAME", sums over the micro-batches of a step, and the first one's of values."""
        return self.of(0).grads

    def clear(self) -> None:
        """Forget everything that was on the device or under way."""
        for part in fields(self):
            getattr(self, part.name).clear()


def is_bulk(value: object) -> bool:
    """Return whether a part of an optimizer's state is a tensor worth moving; scalars stay where they are."""
    return isinstance(value, torch.Tensor) and value.dim() > 0
