"""Copies of items whose tensors have a place of their own on the host."""

from __future__ import annotations

import torch

from ...solver.items import Item
from ..events import Event, UnderWay
from .contents import Buffer
from .world import World


def bring(world: World, item: Item, sources: dict[str, torch.Tensor]) -> Buffer:
    """Start copies of host memory to new device memory, after what still writes to the host's."""
    device, written = world.device, world.contents.written
    after: tuple[Event, ...] = (written[item],) if item in written else ()
    tensors = {key: device.empty_like(source) for key, source in sources.items()}
    copies = tuple(device.copy_in(tensors[key], source, after) for key, source in sources.items())
    return Buffer(tensors, UnderWay(f"the copy of {item} to the device", copies) if copies else None)


def send(world: World, item: Item, buffer: Buffer, targets: dict[str, torch.Tensor]) -> None:
    """Start copies of an item's tensors to host memory, after those that fill them.

    Parameters
    ----------
    targets: host memory for each of the buffer's tensors.
    """
    after = () if buffer.arrived is None else (buffer.arrived,)
    copies = tuple(world.device.copy_out(targets[part], t, after) for part, t in buffer.tensors.items())
    if copies:
        buffer.leaving = world.contents.written[item] = UnderWay(f"the copy of {item} to the host", copies)
        # Until it is known to have arrived, the device's copy is the one to trust.
        world.contents.newer.add(item)
