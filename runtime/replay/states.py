"""Optimizer states: whole on the host, in one item or several on the device."""

from __future__ import annotations

import torch

from ...solver import items
from ...solver.items import Item
from ...solver.problem import Rows
from .contents import is_bulk
from .world import World


class States:
    """Maps items to rows of states and to their place on the host. Only `HostState` changes.

    An item of rows holds these rows of every part of the state that has the parameter's shape; scalars are not cut.
    """

    def __init__(self, world: World) -> None:
        self._host, self._device, self._items = world.host, world.device, world.schedule.states
        self.share = world.schedule.share_of_state

    def items(self, name: str) -> tuple[Item, ...]:
        """Return the items of a parameter's state, first rows first; a state without bytes has an item, too."""
        return self._items.get(name, (items.state(name),))

    def sources(self, item: Item) -> dict[str, torch.Tensor]:
        """Return the host memory that an item is copied from, pinned if possible; nothing before the first update."""
        state = self._host.states.get(item.name, {})
        bulk = {k: self._device.pinned(v) for k, v in state.items() if isinstance(v, torch.Tensor) and is_bulk(v)}
        state.update(bulk)
        return {key: self._part(item, whole) for key, whole in bulk.items()}

    def homes(self, item: Item, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the host memory that an item is copied to, allocated if the host has none yet.

        Parameters
        ----------
        tensors: the item's tensors on the device.
        """
        state, param = self._host.states[item.name], self._host.params[item.name]
        found: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            home = state.get(key)
            if home is tensor or not isinstance(home, torch.Tensor):
                like = tensor
                if item.rows is not None:
                    like = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device="meta")
                home = state[key] = self._device.empty_host_like(like)
            found[key] = self._part(item, home)
        return found

    def _part(self, item: Item, whole: torch.Tensor) -> torch.Tensor:
        return whole if item.rows is None else in_rows(whole, item.rows)


def in_rows(whole: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return some rows of a tensor, as a view."""
    return whole.narrow(0, rows[0], rows[1] - rows[0])
