"""Copies to the host of the values that only the device has."""

from __future__ import annotations

import torch

from ...errors import StorageError
from ...solver.items import Item, ItemKind
from ..events import ActionFailed
from .cast import bring_home
from .low_copies import WHOLE
from .states import States
from .world import World


class Rescue:
    """Makes the host's values current, and tells which were lost after a failure.

    Parameters
    ----------
    unmoved: parameters that never leave an emulated device and share their memory with the host's.
    """

    def __init__(self, world: World, states: States, unmoved: frozenset[str]) -> None:
        self._host, self._device, self._contents, self._states = world.host, world.device, world.contents, states
        self._unmoved = unmoved

    def everything(self, *, after_failure: bool = False) -> frozenset[str]:
        """Copy to the host the values that only the device has; no copy may be under way.

        Parameters
        ----------
        after_failure: go on with the others where values cannot be written to their files.

        Returns: the tensors whose newest values are lost by that.
        """
        contents, lost = self._contents, set[str]()
        with torch.no_grad():
            for item in sorted(contents.newer):
                try:
                    self.one(item)
                except StorageError:
                    if not after_failure:
                        raise
                    lost.add(item.name)
            self._rescue_scalars()
        lost |= bring_home(self._host, after_failure=after_failure)
        contents.newer.clear()
        contents.states_at_home.clear()
        self.buffers()
        return frozenset(lost)

    def unread(self) -> frozenset[str]:
        """Return, after a failure, the tensors whose states or values could not be read from their files."""
        lost = set()
        buffers = [(item.name, buffer) for item, buffer in self._contents.states.items()]
        buffers += [(name, one) for name, one in self._contents.params.items() if self._host.stores(name)]
        for name, buffer in buffers:
            try:
                if buffer.arrived is not None:
                    buffer.arrived.synchronize()
            except ActionFailed as error:
                lost |= {name} if isinstance(error.__cause__, StorageError) else set()
        return frozenset(lost)

    def buffers(self) -> None:
        """Copy to the host the model's buffers of which only the device has the newest values."""
        contents = self._contents
        with torch.no_grad():
            for name in sorted(contents.newer_buffers):
                self._host.buffers[name].copy_(contents.model_buffers[name])
        contents.newer_buffers.clear()

    def give_up_on_device(self) -> frozenset[str]:
        """Reset states shared with a lost device to their values before the device had them.

        Returns: the names of tensors whose newest values only the device had.
        """
        contents = self._contents
        lost = {item.name for item in contents.newer} | contents.newer_buffers | contents.states_at_home.keys()
        for name, known in contents.states_at_home.items():
            state = self._host.states[name]
            away = [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.device.type != "cpu"]
            parts = self._states.items(name)
            came_home = contents.written.keys() - contents.on_tiers.keys()
            partly = len(parts) > 1 and state.keys() - known.keys() and not came_home >= {*parts}
            if partly or any(key not in known for key in away):
                # The device made its first update, and an incomplete state is useless.
                state.clear()
                state.update({WHOLE: known[WHOLE]} if name in self._host.low else {})
            else:
                state.update({key: known[key] for key in away})
        contents.newer.clear()
        contents.newer_buffers.clear()
        return frozenset(lost) | bring_home(self._host, after_failure=True)

    def one(self, item: Item) -> None:
        """Copy an item's values to the host."""
        contents, name = self._contents, item.name
        if item.kind is ItemKind.PARAMETER and name in contents.params and name not in self._unmoved:
            self._states.fill(self._host.params[name], contents.params[name].tensors[""])
        elif item in contents.states and not self._is_the_tiers(item):
            self._rescue_state(item, contents.states[item].tensors)
        elif item in contents.on_tiers:
            contents.written[item].synchronize()
            for key, home in self._states.homes(item, contents.on_tiers[item]).items():
                self._states.fill(home, contents.on_tiers[item][key])

    def _is_the_tiers(self, item: Item) -> bool:
        """Return whether a state on the device, or on its way, is still its tier's copy, not updated since."""
        return item in self._contents.on_tiers and self._contents.states[item].leaving is None

    def _rescue_scalars(self) -> None:
        """Copy scalars of states, which live where their parameter was last updated, to the host, all at once."""
        away = [
            (state, key, value)
            for state in self._host.states.values()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type != "cpu"
        ]
        for dtype in {value.dtype for _, _, value in away}:
            same = [entry for entry in away if entry[2].dtype == dtype]
            for (state, key, _), value in zip(same, torch.stack([value for _, _, value in same]).cpu()):
                state[key] = value.clone()

    def _rescue_state(self, item: Item, tensors: dict[str, torch.Tensor]) -> None:
        if item.rows is not None or item.name in self._host.in_store:
            for key, home in self._states.homes(item, tensors).items():
                self._states.fill(home, tensors[key])
            return
        state = self._host.states[item.name]
        for key, tensor in tensors.items():
            own = state.get(key)
            if not isinstance(own, torch.Tensor):
                continue
            if own is not tensor:
                own.copy_(tensor)
            elif tensor.device.type != "cpu":
                # Made on the device by the first update; the host has no copy yet.
                state[key] = self._device.empty_host_like(tensor).copy_(tensor)
