"""A model's parameters on a device while it runs module by module: some stay, the others come as they are used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.devices.device import Device
from ..runtime.events import Event
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.modules import buffers_of, parameters_of
from ..runtime.torch_names.tensors import StorageWeakRef, has_expired, storage_key
from ..runtime.torch_names.tracing import TorchDispatchMode


@dataclass(frozen=True, eq=False)
class Unit:
    """A module with parameters of its own.

    Parameters
    ----------
    params: its own parameters by their name in it. has_parts: modules below it have parameters, too, so that its own
        have to be there while theirs come.
    """

    module: torch.nn.Module
    params: dict[str, torch.nn.Parameter]
    has_parts: bool


def units_of(model: torch.nn.Module) -> list[Unit]:
    """List the modules that have parameters of their own, in the order in which they are registered."""
    found = []
    for module in model.modules():
        own = {name: param for name, param in parameters_of(module).items() if param is not None}
        if own:
            below = any(True for part in module.modules() if part is not module and any(part.parameters()))
            found.append(Unit(module, own, below))
    return found


def bytes_of(params: dict[str, torch.nn.Parameter]) -> int:
    """Return the bytes of some parameters."""
    return sum(param.nbytes for param in params.values())


class ReadElsewhere:
    """Watches for parameters that are read while their module does not run, as that of a head in a loss of its own.

    State: `found`, the module and name of each.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.found: set[tuple[torch.nn.Module, str]] = set()
        self._running: list[Unit] = []
        self._units = units_of(model)
        self._places: dict[int, list[tuple[Unit, str]]] = {}
        for unit in self._units:
            for name, param in unit.params.items():
                self._places.setdefault(storage_key(param.untyped_storage()), []).append((unit, name))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notice inside the body which modules run."""
        handles = []
        for unit in self._units:
            before = unit.module.register_forward_pre_hook(lambda *_, unit=unit: self._running.append(unit))
            after = unit.module.register_forward_hook(lambda *_: self._ended(), always_call=True)
            handles += [before, after]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _ended(self) -> None:
        self._running.pop()

    def read(self, tensor: torch.Tensor) -> None:
        """Note a tensor that an operator reads."""
        places = self._places.get(storage_key(tensor.untyped_storage()), [])
        if places and not any(unit in self._running for unit, _ in places):
            self.found |= {(unit.module, name) for unit, name in places}


class Streamed:
    """Inside the body, the model runs on the device, and its parameters are there when a module reads them.

    State: `_there`, parameters on the device by the id of the host's; `_next`, which module followed a module in the
    last run, so that its parameters come while that one computes; `_coming`, the module whose parameters come now;
    `_places`, what was in the tables of modules before.

    Parameters
    ----------
    stays: ids of the parameters that are on the device all the time.
    """

    def __init__(self, model: torch.nn.Module, device: Device, stays: Iterable[int]) -> None:
        self._model, self._device, self._stays = model, device, frozenset(stays)
        self._there: dict[int, torch.nn.Parameter] = {}
        self._next: dict[Unit, Unit] = {}
        self._last: Unit | None = None
        self._coming: tuple[Unit, dict[str, torch.nn.Parameter], tuple[Event, ...]] | None = None
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        try:
            for module in self._model.modules():
                for name, buffer in buffers_of(module).items():
                    if buffer is not None:
                        self._put(buffers_of(module), name, self._device.bring(buffer))
            for unit in units_of(self._model):
                self._take(unit)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        for table, name, value in reversed(self._places):
            table[name] = value
        if self._coming is not None:
            self._let_go()
        self._device.drain()
        self._device.ledger.remove("p", sum(param.nbytes for param in self._there.values()))
        self._there.clear()

    def _put(self, table: dict[str, Any], name: str, value: Any) -> None:
        self._places.append((table, name, table[name]))
        table[name] = value

    def _take(self, unit: Unit) -> None:
        """Bring what stays of a module, and have the rest come whenever it runs."""
        for name, param in unit.params.items():
            if id(param) in self._stays:
                if id(param) not in self._there:
                    self._device.ledger.add("p", param.nbytes)
                    self._there[id(param)] = _parameter(self._device.bring(param.detach()))
                self._put(parameters_of(unit.module), name, self._there[id(param)])
            else:
                # What a module leaves after it has run; restored at the end like all the others.
                self._places.append((parameters_of(unit.module), name, param))
        if self._passing(unit):
            before = unit.module.register_forward_pre_hook(lambda *_: self._arrive(unit), prepend=True)
            after = unit.module.register_forward_hook(lambda *_: self._leave(unit), always_call=True)
            self._handles += [before, after]

    def _passing(self, unit: Unit) -> dict[str, torch.nn.Parameter]:
        return {name: param for name, param in unit.params.items() if id(param) not in self._stays}

    def _arrive(self, unit: Unit) -> None:
        if self._coming is not None and self._coming[0] is not unit:
            self._let_go()  # the order has changed
        if self._coming is None:
            self._start(unit)
        assert self._coming is not None
        _, arrived, events = self._coming
        self._coming = None
        for event in events:
            event.wait()
        parameters_of(unit.module).update(arrived)
        if self._last is not None:
            self._next[self._last] = unit
        self._last = unit
        following = self._next.get(unit)
        if following is not None and following is not unit:
            self._start(following)

    def _start(self, unit: Unit) -> None:
        passing = self._passing(unit)
        self._device.ledger.add("p", bytes_of(passing))
        arriving = {name: self._device.empty_like(param) for name, param in passing.items()}
        events = tuple(self._device.copy_in(arriving[name], passing[name].detach(), ()) for name in passing)
        self._coming = unit, {name: _parameter(tensor) for name, tensor in arriving.items()}, events

    def _let_go(self) -> None:
        assert self._coming is not None
        unit, _, events = self._coming
        self._coming = None
        for event in events:
            event.wait()  # the copy writes what is let go now
        self._device.ledger.remove("p", bytes_of(self._passing(unit)))

    def _leave(self, unit: Unit) -> None:
        passing = self._passing(unit)
        parameters_of(unit.module).update(passing)
        self._device.ledger.remove("p", bytes_of(passing))


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


class Held(TorchDispatchMode):
    """Counts the bytes of the storages that operators make inside the body; what they only read is not counted.

    State: `peak_bytes`, the most that were alive at once; `_alive` and `_read`, the storages made and read, by what
    their weak references hold.

    Parameters
    ----------
    given: tensors that are counted, too, though they are there before. reads: is called with each tensor that an
        operator reads.
    """

    def __init__(self, *given: torch.Tensor, reads: Callable[[torch.Tensor], None] = lambda tensor: None) -> None:
        super().__init__()
        self._reads = reads
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._read: dict[int, StorageWeakRef] = {}
        self.peak_bytes = 0
        self._note(given)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._alive = {key: found for key, found in self._alive.items() if not has_expired(key)}
        self._read = {key: weak for key, weak in self._read.items() if not has_expired(key)}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._reads(leaf)
                weak = StorageWeakRef(leaf.untyped_storage())
                if weak.cdata not in self._alive:
                    self._read[weak.cdata] = weak
        result = function(*args, **(kwargs or {}))
        self._note(pytree.tree_leaves(result))
        return result

    def _note(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                weak = StorageWeakRef(storage)
                if weak.cdata not in self._read:
                    self._alive[weak.cdata] = weak, storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
