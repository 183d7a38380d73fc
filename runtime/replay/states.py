"""Optimizer states: whole on the host, in one item or several on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import torch

from ...errors import StorageError
from ...solver import items
from ...solver.items import Item
from ...solver.problem import Rows
from ..devices.pinned import flat_bytes
from ..layouts import steps_of
from .contents import is_bulk
from .low_copies import WHOLE
from .world import World


class States:
    """Maps items to rows of states and to their place on the host. Only `HostState` changes.

    An item of rows holds these rows of every part of the state that has the parameter's shape; scalars are not cut.
    """

    def __init__(self, world: World) -> None:
        self._host, self._device, self._items = world.host, world.device, world.schedule.states
        self._twice = world.schedule.in_two_slots
        self.share = world.schedule.share_of_state

    def items(self, name: str) -> tuple[Item, ...]:
        """Return the items of a parameter's state, first rows first; a state without bytes has an item, too."""
        return self._items.get(name, (items.state(name),))

    def sources(self, item: Item) -> dict[str, torch.Tensor]:
        """Return the host memory that an item is copied from, pinned if possible; nothing before the first update."""
        state = self._host.states.get(item.name, {})
        bulk = {
            k: self._settled(item.name, k, v) for k, v in state.items() if isinstance(v, torch.Tensor) and is_bulk(v)
        }
        state.update(bulk)
        return {key: self._part(item, whole) for key, whole in bulk.items()}

    def settle(self, name: str) -> bool:
        """Move a parameter's state to RAM or to files, as the plan has it; return whether anything moved."""
        store, state = self._host.store, self._host.states[name]
        there = name in self._host.in_store
        found = {key: v for key, v in state.items() if isinstance(v, torch.Tensor) and is_bulk(v)}
        moving = {key: v for key, v in found.items() if store is not None and v.numel() and store.holds(v) != there}
        state.update({key: self._settled(name, key, tensor) for key, tensor in moving.items()})
        return bool(moving)

    def _settled(self, name: str, key: str, own: torch.Tensor) -> torch.Tensor:
        """Return a part of a state in memory of the kind that the plan gives it, moved there if it is not."""
        store = self._host.store
        if key == WHOLE:  # the user's own memory
            return own
        if store is None or store.holds(own) == (name in self._host.in_store):
            return own if name in self._host.in_store else self._device.pinned(own)
        moved = self._empty(name, key, own)
        self.fill(moved, own)
        return moved

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
                home = state[key] = self._empty(item.name, key, like)
            found[key] = self._part(item, home)
        return found

    def _empty(self, name: str, key: str, like: torch.Tensor) -> torch.Tensor:
        if self._host.store is None or name not in self._host.in_store:
            return self._device.empty_host_like(like)
        found = self._host.store.empty(_stored_name(name, key), like, self._starts(name, like))
        if name in self._twice:
            self._host.store.reserve_twice(found)
        return found

    def _starts(self, name: str, like: torch.Tensor) -> tuple[int, ...]:
        """Return the offsets in bytes at which the items of a part of a state begin."""
        return first_bytes(self.items(name), like)

    def reserve(self, forms: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take the space in files for states that first updates will make, and for second places of all that need them.

        Parameters
        ----------
        forms: by parameter and part of its state, a tensor with the part's shape, strides and dtype.

        Raises: StorageError if there is too little space; states that are there have no more of it than before then.
        """
        store = self._host.store
        if store is None:
            return
        parts = [(name, key, like) for name, form in forms.items() for key, like in form.items()]
        twice = {_stored_name(name, key) for name, key, _ in parts if name in self._twice}
        store.reserve({_stored_name(name, key): (like, self._starts(name, like)) for name, key, like in parts}, twice)
        states = [value for name in self._twice for value in self._host.states.get(name, {}).values()]
        with contextlib.ExitStack() as given_back:
            for value in states:
                if isinstance(value, torch.Tensor):
                    given_back.callback(store.reserve_twice(value))
            given_back.pop_all()

    def fill(self, home: torch.Tensor, values: torch.Tensor) -> None:
        """Copy values to host memory, now."""
        stored = self._host.store.bytes_of(home) if self._host.store is not None else None
        if stored is None:
            home.copy_(values)
            self._host.written((home,))
            return
        stored.write(as_in_file("", "", values.cpu(), home), 0).synchronize()

    def _part(self, item: Item, whole: torch.Tensor) -> torch.Tensor:
        return whole if item.rows is None else in_rows(whole, item.rows)


def as_in_file(name: str, key: str, values: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
    """Return the flat bytes of a part of a state as its place in a file has them.

    Raises: StorageError if the optimizer has made a tensor of another shape or precision than there.
    """
    if (values.dtype, values.shape) != (home.dtype, home.shape):
        raise StorageError(
            f"the optimizer has replaced {key!r} in the state of {name} by {values.dtype} {tuple(values.shape)}, but "
            f"its files hold {home.dtype} {tuple(home.shape)}; compile without storage= for this optimizer"
        )
    if steps_of(values.shape, values.stride()) != steps_of(home.shape, home.stride()):
        values = torch.empty_strided(home.shape, home.stride(), dtype=home.dtype).copy_(values)
    flat = flat_bytes(values)
    assert flat is not None, "what lies in one piece in a file does so in memory"
    return flat


def first_bytes(pieces: Iterable[Item], like: torch.Tensor) -> tuple[int, ...]:
    """Return the offsets in bytes at which the rows of pieces begin in a tensor."""
    # Pieces are written one by one, so none of them should begin within what is written at once.
    row_bytes = like.stride(0) * like.element_size() if like.dim() else 0
    return tuple(piece.rows[0] * row_bytes for piece in pieces if piece.rows is not None)


def _stored_name(name: str, key: str) -> str:
    return f"{name}: {key}"


def in_rows(whole: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return some rows of a tensor, as a view."""
    return whole.narrow(0, rows[0], rows[1] - rows[0])
