"""Tensors of the host whose memory lies in files: they take no RAM, and the engine reads and writes the same bytes."""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import NamedTuple

import torch

from ...errors import ArgumentValueError
from ..layouts import span
from .addresses import Addresses
from .engine import Engine
from .file_bytes import StoredBytes
from .links import link
from .mapping import Showing, mapped
from .pieces import Piece
from .stored import Stored

log = logging.getLogger("offmate")

_numbers = itertools.count(1)  # stores of one engine share its names


class MappedStore:
    """Host memory in files on storage paths.

    Its tensors are ordinary ones on the CPU. Whoever reads or writes one directly goes through the system's page cache,
    which the system can drop at any time. A disk that fails then ends the process, as for every mapped file.

    The engine must not transfer bytes of a chunk while somebody uses that chunk directly. After direct writes, `forget`
    has to come before the engine reads their bytes. A file that a checkpoint keeps is never written again, neither by
    the engine nor by whoever writes to a tensor: `forget` then writes what has changed to another file.

    The space is given back when the last tensor on it is gone. After the engine was closed, tensors keep their
    values for as long as they live.

    Parameters
    ----------
    engine: has the paths. proportions: by path, of the bytes that it gets; None for equal ones.

    State: `proportions`; `sets`, how often checkpoints that are announced will keep all tensors; `_links`, the folders
    of those that were made; `_reserved`, by name, tensors that nobody has asked for yet.
    """

    def __init__(self, engine: Engine, proportions: Sequence[float] | None = None) -> None:
        self._engine, self.proportions = engine, proportions
        self.sets, self._links = 0, list[PurePath]()
        self._reserved: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}
        self._stretches = _Stretches(weakref.WeakMethod(engine.release))

    def empty(self, name: str, like: torch.Tensor, cuts: Sequence[int] = ()) -> torch.Tensor:
        """Return a tensor whose memory lies in files. Its values may be anything.

        Parameters
        ----------
        name: for messages; it need not be unique. like: a tensor with the shape, the strides and the dtype; it may be
            on meta. cuts: offsets in bytes at which pieces begin that are transferred one by one (`Engine.store`).

        Returns: a tensor on the CPU. One without elements has no files.
        Raises: StorageError if a path has too little space, or if the system maps no more files. ArgumentValueError for
        cuts that are not within the tensor, and for an engine without paths.
        """
        reserved, its_cuts = self._reserved.pop(name, (None, ()))
        if reserved is not None and _alike(reserved, like) and its_cuts == tuple(cuts):
            return reserved
        del reserved  # its space is given back before more is taken
        n_bytes = span(like.shape, like.stride()) * like.element_size()
        if n_bytes == 0:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        stored = self._engine.store(f"{name} (mapped, number {next(_numbers)})", n_bytes, self.proportions, cuts)
        try:
            addresses = mapped(stored)
        except BaseException:
            self._engine.release(stored)
            stored.give_back()
            raise
        memory = (ctypes.c_ubyte * n_bytes).from_address(addresses.first)
        stored.shown = Showing(stored, addresses.first, weakref.ref(memory))
        self._stretches.add(memory, _Stretch(addresses.first, addresses.first + n_bytes, stored, addresses))
        # The storage holds the ctypes object, which dies with it.
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        own = torch.empty(0, dtype=like.dtype, device="cpu")
        return own.set_(flat.untyped_storage(), 0, like.shape, like.stride())

    def reserve(self, forms: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]], twice: Collection[str] = ()) -> None:
        """Take the space now for tensors that `empty` will be asked for, and give back that of other such ones.

        Parameters
        ----------
        forms: by name, a tensor with the shape, the strides and the dtype, which may be on meta, and the cuts.
        twice: those that get a second place as well (`reserve_twice`).

        Raises: StorageError if a path has too little space, or if the system maps no more files.
        """
        for name in self._reserved.keys() - forms.keys():
            del self._reserved[name]
        for name, (like, cuts) in forms.items():
            self._reserved[name] = self.empty(name, like, cuts), cuts
            if name in twice:
                self.reserve_twice(self._reserved[name][0])

    def move(self, proportions: Sequence[float]) -> int:
        """Let bytes move to other paths when they are written next, as `Engine.move`; return how many move."""
        self.proportions = proportions
        folders = self._engine.folders
        self._links = [below for below in self._links if any((folder / below).exists() for folder in folders)]
        return self._engine.move(proportions, max(self.sets, len(self._links) + 1 if self._links else 0))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is the store's."""
        return self._place(tensor) is not None

    def holds_all_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is one that `empty` returned, and not a part of it."""
        place = self._place(tensor)
        return place is not None and (place.start, place.end) == (0, place.stored.n_bytes)

    def bytes_of(self, tensor: torch.Tensor) -> StoredBytes | None:
        """Return where a tensor's bytes lie; None if its memory is not the store's.

        Parameters
        ----------
        tensor: one that `empty` returned, or a view without gaps of one, such as some of its rows.

        Raises: ArgumentValueError for a view with gaps.
        """
        place = self._place(tensor)
        if place is None:
            return None
        if place.end - place.start != tensor.numel() * tensor.element_size():
            raise ArgumentValueError(
                f"a view of {place.stored.name} has gaps: its shape is {tuple(tensor.shape)} and its strides are "
                f"{tensor.stride()}. Only bytes without gaps can be transferred; take whole rows"
            )
        return StoredBytes(self._engine, place.stored, place.start)

    def forget(self, tensor: torch.Tensor) -> None:
        """Note that a tensor was written to directly; for one that is not the store's, do nothing.

        All bytes from its first to its last count as written, and the engine's reads of their chunks are not verified
        until it has written these again.

        Raises: StorageError if a transfer of the same chunks has not ended.
        """
        place = self._place(tensor)
        if place is not None:
            self._forget(place)

    def forget_all(self) -> None:
        """Note that all tensors of the store may have been written to directly.

        Raises: StorageError if any transfer has not ended.
        """
        for stretch in self._stretches.all():
            self._forget(_Place(stretch.stored, 0, stretch.stored.n_bytes))

    def _forget(self, place: _Place) -> None:
        chunks = place.stored.forget(place.start, place.end)
        shown = place.stored.shown
        assert isinstance(shown, Showing), "it was mapped when it was stored"
        memory = shown.memory() if chunks else None
        if memory is None:
            return
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        ranges = [place.stored.chunks.range_of(chunk) for chunk in chunks]
        for event in [self._engine.write(place.stored, whole[first:last], start=first) for first, last in ranges]:
            event.synchronize()

    def link(self, tensors: Sequence[torch.Tensor], below: PurePath) -> list[list[Piece]]:
        """Keep tensors as they are now: their files get second names, and are never written again.

        Parameters
        ----------
        tensors: each as `empty` returned it. below: the folder that gets the names, below that of each path.

        Returns: by tensor, its pieces in order.
        Raises: StorageError if files cannot be kept.
        """
        places = [self._place(tensor) for tensor in tensors]
        stored = [place.stored for place in places if place is not None]
        found = dict(zip(dict.fromkeys(stored), link(tuple(dict.fromkeys(stored)), below, self._engine.seal)))
        self._links.append(below)
        return [found[one] for one in stored]

    def make_room(self) -> None:
        """Reserve the files that will be written instead of those that are kept.

        Raises: StorageError if a path has too little space.
        """
        for stretch in self._stretches.all():
            stretch.stored.places.make_room()

    def reserve_twice(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Reserve a second place for a tensor's bytes, so that a write can leave those that are there.

        Returns: what gives it back, as long as nothing was written after this call.
        Raises: StorageError if a path has too little space.
        """
        place = self._place(tensor)
        return place.stored.places.reserve_twice() if place is not None else _nothing

    def _place(self, tensor: torch.Tensor) -> _Place | None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
            return None
        first = tensor.data_ptr()
        end = first + span(tensor.shape, tensor.stride()) * tensor.element_size()
        stretch = self._stretches.at(first, end)
        return None if stretch is None else _Place(stretch.stored, first - stretch.first, end - stretch.first)


def _nothing() -> None:
    """Give nothing back."""


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


class _Place(NamedTuple):
    """A part of a stored tensor, by offsets in bytes."""

    stored: Stored
    start: int
    end: int


class _Stretch(NamedTuple):
    """The memory of a tensor, by its first address and the one behind its last, and where it lies in files."""

    first: int
    end: int
    stored: Stored
    addresses: Addresses


class _Stretches:
    """All memory of a store that is in use, by address.

    Memory dies on any thread, even one that has the lock. So the dead are noted, and whoever has had the lock removes
    them. Until then their addresses are nobody else's.

    State: `_in_use`, in the order of addresses, changed under `_lock`; `_dead`.

    Parameters
    ----------
    release: lets the engine give space back, and does not keep it alive: tensors may outlive the engine, which is
        closed when nobody uses it.
    """

    def __init__(self, release: weakref.WeakMethod[Callable[[Stored], None]]) -> None:
        self._release = release
        self._in_use: list[_Stretch] = []
        self._dead: deque[_Stretch] = deque()
        self._lock = threading.Lock()

    def add(self, memory: object, stretch: _Stretch) -> None:
        """Add memory, for as long as an object lives that stands for it."""
        weakref.finalize(memory, self._died, stretch).atexit = False
        with self._locked():
            insort(self._in_use, stretch, key=_first)

    def at(self, first: int, end: int) -> _Stretch | None:
        """Return the stretch that has these addresses; None if none has them all."""
        with self._locked():
            number = bisect_right(self._in_use, first, key=_first) - 1
            found = self._in_use[number] if number >= 0 else None
        return found if found is not None and end <= found.end else None

    def all(self) -> tuple[_Stretch, ...]:
        """Return all stretches in use."""
        with self._locked():
            return tuple(self._in_use)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._remove_dead()

    def _died(self, stretch: _Stretch) -> None:
        self._dead.append(stretch)
        self._remove_dead()

    def _remove_dead(self) -> None:
        while self._dead and self._lock.acquire(blocking=False):
            try:
                gone = self._dead.popleft() if self._dead else None
                if gone is not None:
                    self._in_use.remove(gone)
            finally:
                self._lock.release()
            if gone is not None:
                self._give_back(gone)

    def _give_back(self, gone: _Stretch) -> None:
        try:
            gone.addresses.give_back()
        except OSError as error:
            log.warning("addresses of %s stay taken: %s", gone.stored.name, error)
        release = self._release()
        if release is not None:
            release(gone.stored)


def _first(stretch: _Stretch) -> int:
    return stretch.first
