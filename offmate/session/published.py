"""An optimizer's states as the user sees them, next to those that the plan keeps; and the user's changes of them."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch

from ..errors import ProtocolError
from ..optim.masters import MASTER, was_written
from ..optim.updater import Updater
from ..runtime.devices.pinned import flat_bytes
from ..runtime.layouts import on_storage
from ..runtime.replay.binding import HostState
from ..runtime.replay.contents import is_bulk
from ..runtime.replay.low_copies import WHOLE
from ..runtime.torch_names.autograd import without_torch_function
from ..runtime.torch_names.tensors import version_of

_State = dict[str, Any]


class Published:
    """The contents of `optimizer.state`.

    A tensor there shares the memory of the host's tensor, but has its own version counter, so that only the user's
    edits count.

    State: `_shown`, per parameter the objects that were shown last and their versions; `read`, whether the user has
    read any, and may have written through `.data`, which no version reveals; `handed_out`, whether the user has ever
    read any, and may hold tensors. Changed on the training thread only, as
    are `HostState.states` when the user's changes are adopted.

    Parameters
    ----------
    updater: the updater of the optimizer. host: the states that the plan keeps. in_files: whether they may lie in
        files.
    """

    def __init__(self, updater: Updater, host: HostState, in_files: bool = False) -> None:
        self._updater, self._host, self._in_files = updater, host, in_files
        self._shown: dict[str, dict[str, tuple[Any, int]]] = {}
        self.read = self.handed_out = False
        self.adopt_all()

    @property
    def _visible(self) -> dict[torch.Tensor, _State]:
        # Not through the property, which makes the states current first.
        states: dict[torch.Tensor, _State] = self._updater.optimizer.__dict__["state"]
        return states

    # -- to the user --------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Show the host's states; those that the user has changed meanwhile stay as they are."""
        visible = self._visible
        for param, name in self._updater.names.items():
            if self._differs(visible.get(param), name):
                continue
            own = self._of(name)
            if own:
                self._show_one(visible.setdefault(param, {}), own)
            else:
                visible.pop(param, None)
            self._note(param, name)

    def _of(self, name: str) -> _State:
        """Return a parameter's state without the parameter itself, which is no part of it for the user."""
        return {key: value for key, value in self._host.states.get(name, {}).items() if key != WHOLE}

    def _show_one(self, entry: _State, own: _State) -> None:
        for key in entry.keys() - own.keys():
            del entry[key]
        for key, value in own.items():
            if not isinstance(value, torch.Tensor):
                entry[key] = value
            elif not _same_memory(entry.get(key), value):
                entry[key] = _alias(value, entry.get(key))

    def _note(self, param: torch.Tensor, name: str) -> None:
        entry = self._visible.get(param) or {}
        self._shown[name] = {key: (value, _version(value)) for key, value in entry.items()}

    # -- from the user ------------------------------------------------------------------------------------------------

    def changed(self) -> tuple[str, ...]:
        """Return the parameters whose states the user has cleared, replaced or written into since they were shown."""
        visible = self._visible
        return tuple(name for param, name in self._updater.names.items() if self._differs(visible.get(param), name))

    def _differs(self, entry: _State | None, name: str) -> bool:
        shown = self._shown[name]
        if not entry:
            return bool(shown)
        return entry.keys() != shown.keys() or any(
            value is not shown[key][0] or _version(value) != shown[key][1] for key, value in entry.items()
        )

    def with_written_copies(self) -> tuple[str, ...]:
        """Return the parameters whose float32 copies the user has written into since plain PyTorch's last step."""
        visible = self._visible
        return tuple(n for p, n in self._updater.names.items() if was_written(visible.get(p, {}).get(MASTER)))

    def changed_copies(self, names: tuple[str, ...]) -> tuple[set[str], set[str]]:
        """Return the parameters among these whose float32 copies the user has written into, and has replaced."""
        written, replaced = set(), set()
        for param, name in self._updater.names.items():
            copy = (self._visible.get(param) or {}).get(MASTER) if name in names else None
            if copy is not None:
                seen, version = self._shown[name].get(MASTER, (None, -1))
                if copy is not seen:
                    replaced.add(name)
                elif _version(copy) != version:
                    written.add(name)
        return written, replaced

    def adopt(self, names: tuple[str, ...]) -> None:
        """Adopt the user's changes of these parameters' states; nothing newer may be on the device or under way."""
        for param, name in self._updater.names.items():
            if name in names:
                self._adopt_one(param, name, self._visible.get(param) or {})

    def adopt_all(self) -> None:
        """Adopt all visible states as the current ones, as after a state was loaded. Raises: as `check_taken`."""
        self.check_taken()
        for param, name in self._updater.names.items():
            self._adopt_one(param, name, self._visible.get(param) or {})

    def refuse(self, names: tuple[str, ...]) -> None:
        """Show the host's states again, instead of the user's changes of these parameters' states."""
        places = Counter(id(value) for entry in self._visible.values() for value in entry.values())
        for param, name in self._updater.names.items():
            if name in names:
                entry = self._visible.get(param) or {}
                for key in [key for key, value in entry.items() if places[id(value)] > 1]:
                    del entry[key]  # it is another parameter's, too, and cannot show both
                self._note(param, name)
        self.show()

    def _adopt_one(self, param: torch.Tensor, name: str, entry: _State) -> None:
        hidden = {WHOLE: self._host.whole(name)} if name in self._host.low else {}
        self._host.states[name] = {**hidden, **{key: _taken(value) for key, value in entry.items()}}
        if entry:
            self._show_one(entry, self._of(name))
        self._note(param, name)

    def uncounted(self, names: tuple[str, ...]) -> dict[str, str]:
        """Describe, per parameter among these, a tensor in its state that has another size than planned."""
        found: dict[str, str] = {}
        for param, name in self._updater.names.items():
            own = self._of(name) if name in names else None
            for key, value in (self._visible.get(param) or {}).items() if own else ():
                before = own.get(key) if own else None
                if is_bulk(value) and _counted(value) != _counted(before):
                    found[name] = f"{key!r} became {_counted(value)} where it was {_counted(before)}"
        return found

    def check_taken(self) -> None:
        """Look whether the plan can have the visible states.

        Raises: ProtocolError if states of two parameters have the same bytes, which both updates would change, and if
        one has strides that its rows in files, or an update, cannot have.
        """
        stretches = []
        for param, name in self._updater.names.items():
            for key, value in (self._visible.get(param) or {}).items():
                if not is_bulk(value) or value.layout is not torch.strided:
                    continue
                self._check_strides(param, name, key, value)
                flat = flat_bytes(value)
                if flat is not None and flat.numel() and not flat.is_meta:
                    stretches.append((str(flat.device), flat.data_ptr(), flat.data_ptr() + flat.numel(), name, key))
        stretches.sort()
        for (where, _, end, one, key), (there, start, _, other, second) in itertools.pairwise(stretches):
            if where == there and start < end and one != other:
                raise ProtocolError(
                    f"the optimizer's states {key!r} of {one} and {second!r} of {other} are the same memory, which "
                    "plain PyTorch would update twice, one after the other, and a plan at the same time. Give each "
                    "parameter a tensor of its own (clone it)"
                )

    def _check_strides(self, param: torch.Tensor, name: str, key: str, value: torch.Tensor) -> None:
        like = self._in_files_like(param, self._of(name).get(key))
        if like is not None and value.shape == like.shape and _strides(value) != _strides(like):
            raise ProtocolError(
                f"the optimizer's state {key!r} of {name} has the strides {value.stride()}, and in files it would have "
                f"{like.stride()}. They have to be alike, since rows lie there: give it a tensor like "
                "torch.empty_like(parameter).copy_(state)"
            )
        if flat_bytes(value) is None and (self._in_files or self._updater.groups[name].get("fused")):
            why = "a file cannot hold it like that" if self._in_files else "PyTorch's fused updates ignore that"
            raise ProtocolError(
                f"the optimizer's state {key!r} of {name} has gaps or repeats in memory, with the shape "
                f"{tuple(value.shape)} and the strides {value.stride()}, and {why}. Give it a tensor without them, "
                "such as state.contiguous()"
            )

    def _in_files_like(self, param: torch.Tensor, own: Any) -> torch.Tensor | None:
        """Return what has the strides of a state in files; None for one that the plan has in RAM."""
        if not self._in_files:
            return None
        if own is None:  # it may lie there
            with without_torch_function():
                return torch.empty_like(param, device="meta")
        store = self._host.store
        return own if store is not None and is_bulk(own) and store.holds(own) else None


def _counted(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if is_bulk(value) else "no tensor of one dimension or more"


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that matter: those of one element may be any."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride()) if size != 1)


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, torch.Tensor) and not value.is_inference() else -1


def _same_memory(seen: Any, value: torch.Tensor) -> bool:
    if not isinstance(seen, torch.Tensor) or seen.is_inference() or seen.device != value.device:
        return False
    if value.layout is not torch.strided or seen.layout is not torch.strided:
        return seen is value
    return (seen.data_ptr(), seen.dtype, seen.shape, seen.stride()) == (
        value.data_ptr(), value.dtype, value.shape, value.stride(),
    )  # fmt: skip


def _alias(value: torch.Tensor, seen: Any) -> torch.Tensor:
    """Make a tensor on this memory with its own version counter; reuse the one that the user holds if possible."""
    if value.layout is not torch.strided:
        return value
    fits = isinstance(seen, torch.Tensor) and not seen.is_inference() and not seen.requires_grad
    if fits and (seen.dtype, seen.device, seen.layout) == (value.dtype, value.device, torch.strided):
        with torch.no_grad():
            return seen.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    return on_storage(value, value)


def _taken(value: Any) -> Any:
    """Convert a part of a state for the plan to keep: move it to the host, if it is not there already."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    if value.is_inference():
        return value.detach().cpu().clone()
    return on_storage(value, value) if value.device.type == "cpu" else value.detach().cpu()
