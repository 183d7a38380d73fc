"""Optimizer states: whole on the host, in one item or several on the device."""

from __future__ import annotations

import torch

from ...solver.problem import Rows
from ...solver.schedule import Schedule, state_rows
from ..devices.device import Device
from .binding import HostState
from .contents import is_bulk


class States:
    """Which rows of which state an item is, and where they lie on the host. Nothing here changes but `HostState`.

    An item of rows holds them of every part of the state that has the parameter's shape; scalars are not cut.
    """

    def __init__(self, schedule: Schedule, host: HostState, device: Device) -> None:
        self._host, self._device, self._items = host, device, schedule.states
        self.share = schedule.share_of_state
        sizes = schedule.item_bytes
        self._rows = {item: state_rows(item, sizes) for items in schedule.states.values() for item in items}

    def items(self, name: str) -> tuple[str, ...]:
        """The items of a parameter's state, first rows first; one that has no bytes is an item, too."""
        return self._items.get(name, (f"s:{name}",))

    def rows(self, item: str) -> Rows | None:
        """The rows of an item; None if it is the whole state."""
        return self._rows[item][1] if item in self._rows else None

    def owner(self, item: str) -> str:
        """The parameter whose state an item is of."""
        return self._rows[item][0] if item in self._rows else item.split(":", 1)[1]

    def sources(self, item: str) -> dict[str, torch.Tensor]:
        """Where an item comes from: host memory that copies read beside compute; nothing before the first update."""
        state = self._host.states.get(self.owner(item), {})
        bulk = {k: self._device.pinned(v) for k, v in state.items() if isinstance(v, torch.Tensor) and is_bulk(v)}
        state.update(bulk)
        return {key: self._part(item, whole) for key, whole in bulk.items()}

    def homes(self, item: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Where an item goes: host memory, made where there is none but the device's own.

        Parameters
        ----------
        tensors: the item's on the device.
        """
        name, rows = self.owner(item), self.rows(item)
        state, param = self._host.states[name], self._host.params[name]
        found: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            home = state.get(key)
            if home is tensor or not isinstance(home, torch.Tensor):
                like = tensor
                if rows is not None:
                    like = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device="meta")
                home = state[key] = self._device.empty_host_like(like)
            found[key] = self._part(item, home)
        return found

    def _part(self, item: str, whole: torch.Tensor) -> torch.Tensor:
        rows = self.rows(item)
        return whole if rows is None else in_rows(whole, rows)


def in_rows(whole: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Some rows of a tensor, on its memory."""
    return whole.narrow(0, rows[0], rows[1] - rows[0])
