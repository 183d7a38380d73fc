"""What computes hand on to later ones, and that may be off the device in between."""

from __future__ import annotations

import torch

from ...solver.items import Item
from ...solver.returns import Returns
from ..layouts import meta_of, on_storage, storage_view
from .contents import Buffer
from .copies import Homes, bring, start_out
from .world import World


class _Away:
    """Sends whole storages to their tiers and brings them back."""

    def __init__(self, world: World) -> None:
        self._world, self._contents, self._homes = world, world.contents, Homes(world)
        self._returns = Returns(world.schedule.returns)

    def release_host(self, *, files: bool = False) -> None:
        """Free the memory that they leave to, in files only if asked; no copy may be under way, nor a value needed."""
        self._homes.clear(files=files)
        self._returns.clear()

    def _bring(self, item: Item) -> tuple[Buffer, dict[str, torch.Tensor]]:
        """Start an item's copy to the device; return it, and the views that tensors had of it."""
        last = self._returns.is_last(item)
        buffer = bring(self._world, item, self._homes.of(item), stays=not last)
        if not last:
            return buffer, self._contents.views[item]
        del self._contents.written[item]
        return buffer, self._contents.views.pop(item)

    def _send(self, item: Item, wholes: dict[str, torch.Tensor]) -> None:
        homes = self._homes.for_storages(item, wholes)
        start_out(self._world, item, ((homes[key], whole) for key, whole in wholes.items()))


class Values(_Away):
    """Interface values. Several may view one storage, which is the item; their views of it are recorded."""

    def bring(self, item: Item) -> None:
        buffer, views = self._bring(item)
        whole = next(iter(buffer.tensors.values()))
        values = self._contents.of(item.slot).values
        for name, view in views.items():
            values[name] = Buffer({"": on_storage(whole, view)}, buffer.arrived)

    def send(self, item: Item) -> None:
        values = self._contents.of(item.slot).values
        views = {name: values[name].read() for name in self._names(item) if name in values}
        self._contents.views[item] = {name: meta_of(view) for name, view in views.items()}
        self._send(item, {"": storage_view(next(iter(views.values())))})

    def release(self, item: Item) -> None:
        if item in self._contents.written:
            self._contents.written[item].wait()
        values = self._contents.of(item.slot).values
        for name in self._names(item):
            if name in values:
                values.pop(name).settle()  # of a micro-batch that is left out, nothing has read it

    def _names(self, item: Item) -> tuple[str, ...]:
        return self._world.shapes.binding(item.slot).values_in.get(item.at(0), ())


class Offloaded(_Away):
    """The values that a block's option offloads: storages that registers of its backward view."""

    def bring(self, item: Item) -> None:
        buffer, views = self._bring(item)
        saved = self._contents.of(item.slot).saved[item.block]
        for key, view in views.items():
            storage, register = key.split("/")
            saved.registers[int(register)] = on_storage(buffer.tensors[storage], view)
        self._contents.of(item.slot).values[item] = Buffer({}, buffer.arrived)

    def send(self, item: Item) -> None:
        saved = self._contents.of(item.slot).saved[item.block]
        wholes: dict[str, torch.Tensor] = {}
        views = self._contents.views[item] = {}
        for storage, registers in self._registers(item).items():
            wholes[str(storage)] = storage_view(saved.registers[registers[0]])
            views |= {f"{storage}/{r}": meta_of(saved.registers[r]) for r in registers}
        self._send(item, wholes)

    def release(self, item: Item) -> None:
        self._contents.written[item].wait()
        saved = self._contents.of(item.slot).saved[item.block]
        for registers in self._registers(item).values():
            for register in registers:
                del saved.registers[register]

    def _registers(self, item: Item) -> dict[int, tuple[int, ...]]:
        return self._world.shapes.binding(item.slot).blocks[item.block].offloaded


class ValueGradients(_Away):
    """Gradients of interface values and of outputs. Only computes release those that have not left."""

    def bring(self, item: Item) -> None:
        buffer, views = self._bring(item)
        batch, key = self._contents.of(item.slot), _key(item)
        batch.grads[key] = on_storage(next(iter(buffer.tensors.values())), views[key])
        batch.values[item] = Buffer({}, buffer.arrived)

    def send(self, item: Item) -> None:
        gradient = self._contents.of(item.slot).grads[_key(item)]
        self._contents.views[item] = {_key(item): meta_of(gradient)}
        self._send(item, {"": storage_view(gradient)})

    def release(self, item: Item) -> None:
        self._contents.written[item].wait()
        del self._contents.of(item.slot).grads[_key(item)]


def _key(item: Item) -> str:
    return f"value:{item.name}"
