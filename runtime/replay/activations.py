"""Interface values and offloaded values: made by forwards for backwards, and off the device in between."""

from __future__ import annotations

import torch

from ...solver.items import Item
from ..layouts import meta_of, on_storage, storage_view
from .contents import Buffer
from .copies import Homes, bring, start_out
from .world import World


class _Away:
    """Sends whole storages to their tiers and brings them back."""

    def __init__(self, world: World) -> None:
        self._world, self._contents, self._homes = world, world.contents, Homes(world)

    def release_host(self, *, files: bool = False) -> None:
        """Free the memory that they leave to, in files only if asked; no copy may be under way, nor a value needed."""
        self._homes.clear(files=files)

    def _bring(self, item: Item) -> Buffer:
        buffer = bring(self._world, item, self._homes.of(item))
        del self._contents.written[item]
        return buffer

    def _send(self, item: Item, wholes: dict[str, torch.Tensor]) -> None:
        homes = self._homes.shared(item, wholes)
        start_out(self._world, item, ((homes[key], whole) for key, whole in wholes.items()))


class Values(_Away):
    """Interface values. Several may view one storage, which is the item; their views of it are recorded."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._names: dict[str, list[str]] = {}
        for name, item in world.binding.value_item.items():
            self._names.setdefault(item, []).append(name)

    def bring(self, item: Item) -> None:
        buffer = self._bring(item)
        whole = next(iter(buffer.tensors.values()))
        values = self._contents.of(item.slot).values
        for name, view in self._contents.views.pop(item).items():
            values[name] = Buffer({"": on_storage(whole, view)}, buffer.arrived)

    def send(self, item: Item) -> None:
        values = self._contents.of(item.slot).values
        views = {name: values[name].read() for name in self._names[item.at(0)] if name in values}
        self._contents.views[item] = {name: meta_of(view) for name, view in views.items()}
        self._send(item, {"": storage_view(next(iter(views.values())))})

    def release(self, item: Item) -> None:
        if item in self._contents.written:
            self._contents.written[item].wait()
        for name in self._names.get(item.at(0), ()):
            self._contents.of(item.slot).values.pop(name, None)


class Offloaded(_Away):
    """The values that a block's option offloads: storages that registers of its backward view."""

    def bring(self, item: Item) -> None:
        buffer = self._bring(item)
        saved = self._contents.of(item.slot).saved[item.block]
        for key, view in self._contents.views.pop(item).items():
            storage, register = key.split("/")
            saved.registers[int(register)] = on_storage(buffer.tensors[storage], view)
        self._contents.of(item.slot).values[item] = Buffer({}, buffer.arrived)

    def send(self, item: Item) -> None:
        saved = self._contents.of(item.slot).saved[item.block]
        wholes: dict[str, torch.Tensor] = {}
        views = self._contents.views[item] = {}
        for storage, registers in self._world.binding.blocks[item.block].offloaded.items():
            wholes[str(storage)] = storage_view(saved.registers[registers[0]])
            views |= {f"{storage}/{r}": meta_of(saved.registers[r]) for r in registers}
        self._send(item, wholes)

    def release(self, item: Item) -> None:
        self._contents.written[item].wait()
        saved = self._contents.of(item.slot).saved[item.block]
        for registers in self._world.binding.blocks[item.block].offloaded.values():
            for register in registers:
                del saved.registers[register]
