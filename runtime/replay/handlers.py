"""Handlers that move and release items, one per kind; those of saved activations are in activations.py.

To add a kind of item, register an `ItemKind`, write a handler, and enter it in `Handlers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from ...solver.items import Item, ItemKind
from ...solver.resources import HOST
from .activations import Offloaded, ValueGradients, Values
from .contents import Buffer, Contents
from .copies import Homes, bring, bring_cast, bring_from_file, send
from .gradients import Gradients
from .states import States
from .world import World


class Handler(Protocol):
    """Moves and releases items of one kind; the caller counts their bytes."""

    def bring(self, item: Item) -> None:
        """Allocate an item on the device and start its copy from the host."""
        ...

    def send(self, item: Item) -> None:
        """Start an item's copy to the host."""
        ...

    def release(self, item: Item) -> None:
        """Free an item's memory on the device, after the copies that read it; if one failed the item stays."""
        ...


class Resting:
    """Items that never move, and that only computes release."""

    def bring(self, item: Item) -> None:
        raise ValueError(f"{item} never comes from the host")

    def send(self, item: Item) -> None:
        raise ValueError(f"{item} never goes to the host")

    def release(self, item: Item) -> None:
        """Do nothing: only the ledger counts the item."""


class Parameters:
    """Compute copies of parameters."""

    def __init__(self, world: World, unmoved: frozenset[str]) -> None:
        self._world, self._contents, self._unmoved = world, world.contents, unmoved
        self._cast = world.schedule.cast_parameters

    def bring(self, item: Item) -> None:
        home, file = self._world.host.params[item.name], self._world.host.files.get(item.name)
        if item.name in self._unmoved:
            self._contents.params[item.name] = Buffer({"": home})
        elif item.name in self._cast and self._world.host.stores(item.name):
            self._contents.params[item.name] = bring_cast(self._world, item)
        elif self._world.tier_of(item) == HOST:
            self._contents.params[item.name] = bring(self._world, item, {"": home})
        elif file is not None:
            self._contents.params[item.name] = bring_from_file(self._world, item, home, file)
        else:  # it is trained, or the user has changed it, so that its values are no longer those of its file
            path = self._world.schedule.rates.host
            self._contents.params[item.name] = bring(self._world, item, {"": home}, path)

    def send(self, item: Item) -> None:
        send(self._world, item, self._contents.params[item.name], {"": self._world.host.params[item.name]})

    def release(self, item: Item) -> None:
        self._contents.params[item.name].settle()
        del self._contents.params[item.name]
        self._contents.newer.discard(item)

    def renew(self, names: Iterable[str]) -> None:
        """Copy the values of parameters that are on the device from the host again."""
        host = self._world.host
        for name in names:
            buffer = self._contents.params.get(name)
            if buffer is not None and name not in self._unmoved:
                buffer.settle()
                with torch.no_grad():
                    next(iter(buffer.tensors.values())).copy_(host.params[name])


class OfStates:
    """Optimizer states, whole or in rows. Their home is on the host, in RAM or in files; some wait on another tier.

    Some rows of a state whose home is in files may leave to RAM. They wait there as on another tier, so that RAM has
    them and no others.

    State: `_homes`, the memory on such tiers. Items that wait there are in `Contents.on_tiers`.
    """

    def __init__(self, world: World, states: States) -> None:
        self._world, self._contents, self._states, self._homes = world, world.contents, states, Homes(world)

    def bring(self, item: Item) -> None:
        waiting = self._contents.on_tiers.get(item)
        if waiting is not None:
            self._contents.states[item] = bring(self._world, item, waiting)
        else:
            path = self._world.schedule.rates.host
            self._contents.states[item] = bring(self._world, item, self._states.sources(item), path)

    def send(self, item: Item) -> None:
        buffer = self._contents.states[item]
        if self._leaves_to_home(item):
            send(self._world, item, buffer, self._states.homes(item, buffer.tensors))
            return
        homes = {key: self._homes.fitting(item, key, tensor) for key, tensor in buffer.tensors.items()}
        send(self._world, item, buffer, homes)
        self._contents.on_tiers[item] = homes

    def _leaves_to_home(self, item: Item) -> bool:
        path = self._world.store_path if item.name in self._world.host.in_store else None
        return self._world.tier_of(item) == (HOST if path is None else path.tier)

    def release(self, item: Item) -> None:
        self._contents.states[item].settle()
        del self._contents.states[item]
        if item not in self._contents.on_tiers:  # otherwise the host's values are still older
            self._contents.newer.discard(item)

    def release_tiers(self) -> None:
        """Free the memory on tiers; none of its values may be newer than the host's."""
        self._contents.on_tiers.clear()
        self._homes.clear()

    def settle(self, in_files: frozenset[str]) -> bool:
        """Move all states to where their homes are, those of `in_files` to files; return whether any moved."""
        host = self._world.host
        host.in_store = in_files if host.store is not None else frozenset()
        moved = [self._states.settle(name) for name in host.states]
        return any(moved)

    def reserve(self, forms: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take the space in files for states that their first updates will make; see `States.reserve`."""
        self._states.reserve(forms)

    def renew(self) -> None:
        """Copy the states that are on the device from the host again; those on tiers will come from the host, too."""
        self._contents.on_tiers.clear()
        for item, buffer in self._contents.states.items():
            buffer.settle()
            sources = self._states.sources(item)
            with torch.no_grad():
                for key, tensor in buffer.tensors.items():
                    tensor.copy_(sources[key])


class OfGradients:
    """Gradients of parameters, of one micro-batch."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients

    def bring(self, item: Item) -> None:
        self._gradients.bring_back(item.name)

    def send(self, item: Item) -> None:
        self._gradients.offload(item.name)

    def release(self, item: Item) -> None:
        self._gradients.free(item.name)


class Totals:
    """Sums of gradients on the device. They return for their update, for further gradients, or for another plan."""

    def __init__(self, world: World, gradients: Gradients) -> None:
        self._host, self._contents, self._gradients = world.host, world.contents, gradients

    def bring(self, item: Item) -> None:
        if item.name in self._contents.grad_leaving and self._host.gate_is_open:
            self._gradients.bring_back(item.name)
        else:
            self._contents.totals[item.name] = self._gradients.restore(item.name)

    def send(self, item: Item) -> None:
        self._gradients.offload_total(item.name)

    def release(self, item: Item) -> None:
        self._gradients.free_total(item.name)


class SharedValues(Resting):
    """Values that many blocks read and that are no parameters."""

    def __init__(self, world: World) -> None:
        self._contents, self._shapes = world.contents, world.shapes

    def release(self, item: Item) -> None:
        shared = self._shapes.binding(item.slot).shared_item
        for name in [name for name, own in shared.items() if own == item.at(0)]:
            self._contents.of(item.slot).shared.pop(name, None)


class OldOutputs(Resting):
    """Outputs of the previous pass."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def release(self, item: Item) -> None:
        self._contents.returned.pop(item, None)


class Handlers:
    """The handlers of all kinds of items.

    Parameters
    ----------
    unmoved: parameters that stay on the device permanently and share their memory with the host's.
    """

    def __init__(self, world: World, states: States, gradients: Gradients, unmoved: frozenset[str]) -> None:
        self.parameters, self.states = Parameters(world, unmoved), OfStates(world, states)
        self._activations = Values(world), Offloaded(world), ValueGradients(world)
        values, offloaded, value_gradients = self._activations
        self.of: dict[ItemKind, Handler] = {
            ItemKind.PARAMETER: self.parameters,
            ItemKind.GRADIENT: OfGradients(gradients),
            ItemKind.PARTIAL: Resting(),
            ItemKind.TOTAL: Totals(world, gradients),
            ItemKind.STATE: self.states,
            ItemKind.VALUE: values,
            ItemKind.VALUE_GRADIENT: value_gradients,
            ItemKind.KEPT: Resting(),
            ItemKind.OFFLOADED: offloaded,
            ItemKind.SHARED: SharedValues(world),
            ItemKind.OUTPUT: Resting(),
            ItemKind.LOG: Resting(),
            ItemKind.OLD_OUTPUT: OldOutputs(world.contents),
        }

    def release_host(self) -> None:
        """Free the memory that items leave to; no copy of it may be under way, and no value still needed.

        What lies in files keeps its space there, so that the next iteration has it.
        """
        for kind in self._activations:
            kind.release_host()
        self.states.release_tiers()

    def release_files(self) -> None:
        """Give back the space in files of what passes through them in an iteration; none may be under way."""
        for kind in self._activations:
            kind.release_host(files=True)
