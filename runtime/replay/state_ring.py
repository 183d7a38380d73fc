"""Updates on the host whose optimizer states lie in files: each piece is read, updated and written back in turn.

The parameter's own values lie beside them, if they are in files as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch

from ...errors import StorageError
from ...solver.items import Item
from ...solver.problem import RING_PIECES
from ..events import Ended, Event, UnderWay
from ..storage.earlier import Earlier
from ..storage.file_bytes import StoredBytes
from ..storage.host_bytes import ALIGNMENT_BYTES, empty_aligned, round_up
from .binding import Update
from .contents import is_bulk
from .states import States, as_in_file, in_rows
from .world import World

_NOTHING = UnderWay("nothing", ())


class Trial(Protocol):
    """An update before the gate, which may have to be undone."""

    @property
    def earlier(self) -> Earlier:
        """What its writes leave in the files."""
        ...

    def is_wanted(self) -> bool:
        """Return whether it may still be made."""
        ...

    def goes_on(self) -> bool:
        """Return whether its next piece is to be updated; a worker asks before each."""
        ...

    def made(self) -> None:
        """Note that its last piece was updated."""
        ...

    def forgives(self) -> bool:
        """Note that a piece could not be updated, and return whether that will be repeated behind the gate."""
        ...


@dataclass
class _Piece:
    """A piece of a state on its way.

    Parameters
    ----------
    homes: by part of the state, these rows in the files; empty before the first update, which makes them.
    values: these rows of the parameter, which are in files or in RAM; in_files: whether they are in files.
    slot: the memory that rows in files are read to. tensors, param: the same there, from its read until it has been
        written; a parameter in RAM stays where it is.
    trial: whose update may have to be undone. updated: whether it has been updated, and is to be written.
    """

    item: Item
    homes: Mapping[str, torch.Tensor]
    values: torch.Tensor
    in_files: bool
    slot: _Slot
    trial: Trial | None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    param: torch.Tensor = field(init=False)
    updated: bool = False

    def __post_init__(self) -> None:
        self.param = self.values


class _Slot:
    """Memory of one piece at a time; `_memory` is made when a piece is first read, and grows with larger ones."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, stored: list[StoredBytes], sizes: list[int]) -> list[torch.Tensor]:
        """Return flat bytes for the parts of a piece, each as far from a page's beginning as it is in its file."""
        ends = list(accumulate(round_up(s.start % ALIGNMENT_BYTES + size) for s, size in zip(stored, sizes)))
        if self._memory.numel() < ends[-1]:
            self._memory = torch.empty(0, dtype=torch.uint8)  # not both at a time
            self._memory = empty_aligned(ends[-1])
        firsts = [end + s.start % ALIGNMENT_BYTES for end, s in zip((0, *ends), stored)]
        return [self._memory[first : first + size] for first, size in zip(firsts, sizes)]


@dataclass
class _Passing:
    """The update of a tensor that has been submitted.

    Parameters
    ----------
    events: of its pieces. written: of their writes. begun: whether any has been updated. makes_state: whether it is the
        first update.
    found: by item, the event of the write that it comes after. tried: whether it may be undone. before: the update
        that is then in force again.
    """

    events: list[Event] = field(default_factory=list)
    written: list[Event] = field(default_factory=list)
    begun: bool = False
    makes_state: bool = False
    found: dict[Item, Event] = field(default_factory=dict)
    tried: bool = False
    before: _Passing | None = None


class StateRing:
    """A few pieces of states in the host's memory: while one is updated, another is read and a third is written.

    Updates are made in the order in which they are submitted. A read waits until the piece that was read so many pieces
    before has been written. So no more than these are in memory, and nothing waits for a later update.

    State: `_written`, the events of the latest writes, one for each piece that is in memory; `_updated`, that of the
    latest update; `_slots`, the memory, that of the next piece first; `_passing`, by parameter, its update since the
    last `clear`; `_broken`, parameters whose earlier states could not be put back. The thread that replays changes
    them, workers only what belongs to their piece.
    """

    def __init__(self, world: World, states: States) -> None:
        self._world, self._states = world, states
        self._written: deque[Event] = deque([_NOTHING] * RING_PIECES, maxlen=RING_PIECES)
        self._updated: Event = _NOTHING
        self._slots = deque(_Slot() for _ in range(RING_PIECES))
        self._passing: dict[str, _Passing] = {}
        self._broken: set[str] = set()

    def takes(self, name: str) -> bool:
        """Return whether a parameter is updated here: the plan has its state in files, and that is where it is."""
        return name in self._world.schedule.updated_from_files and name in self._world.host.in_store

    def may_try(self, name: str) -> bool:
        """Return whether a parameter may be updated here before the gate: its state is there to be put back."""
        if not self.takes(name) or self._world.host.stores(name):
            return False
        self._settle(name)
        return bool(self._parts(name))

    def start(
        self,
        name: str,
        update: Update,
        grad: torch.Tensor,
        scale: torch.Tensor | None,
        after: tuple[Event, ...],
        trial: Trial | None = None,
    ) -> Event:
        """Start the update of a parameter on the host, after those that were started before.

        Parameters
        ----------
        scale: multiplies the gradient first. after: events before it. trial: what decides on it, before the gate.

        Returns: the event of the parameter being updated. Its state may still be on its way to the files.
        """
        self._settle(name)
        world, passing = self._world, _Passing(makes_state=not self._parts(name), tried=trial is not None)
        if passing.tried and name in self._passing:
            passing.before = replace(self._passing[name], found={}, tried=False, before=None)
        self._passing[name] = passing
        path, worker = world.store_path, world.schedule.rates.worker("update-cpu")
        assert path is not None, "what lies in files has a path to them"
        pieces = [self._piece(item, trial) for item in self._states.items(name)]
        before: Event = Ended((self._updated,))
        last = pieces[-1].item
        for piece in pieces:
            item, size = piece.item, world.schedule.item_bytes[piece.item]
            # A failed write is known here at the latest; that of another piece is for whoever needs that one.
            earlier = (world.contents.written[item],) if item in world.contents.written else ()
            passing.found.update((item, event) for event in earlier)
            free, work = Ended((self._written[0],)), _Work(self, piece, passing, update, grad, scale, item == last)
            there = world.device.transfer(partial(self._read, piece), size, path.into, (free, *earlier))
            before = self._updated = world.device.update_on_host(work, (*after, before, there), worker)
            written = world.device.transfer(partial(self._write, piece), size, path.out, (before,))
            self._written.append(written)
            passing.events += [before, written]
            passing.written.append(written)
            world.contents.written[item] = UnderWay(f"the write of the {item.words} to its files", (written,))
        return before

    def values_of(self, name: str) -> tuple[Event, ...]:
        """Return the events after which the new values of a parameter in files may be read; none for one in RAM."""
        return tuple(self._passing[name].written) if self._world.host.stores(name) else ()

    def _settle(self, name: str) -> None:
        """Have the whole state of a parameter in files, as an update finds it there."""
        earlier = self._passing.get(name)
        if earlier is not None and earlier.makes_state:
            for event in earlier.events:  # only its writes make the state's places in files
                event.synchronize()
        if self._parts(name):
            self._states.settle(name)  # the user may have replaced a part

    def _parts(self, name: str) -> dict[str, torch.Tensor]:
        state = self._world.host.states.get(name, {})
        return {k: v for k, v in list(state.items()) if isinstance(v, torch.Tensor) and is_bulk(v)}

    def _piece(self, item: Item, trial: Trial | None) -> _Piece:
        self._slots.rotate(-1)
        bulk = self._parts(item.name)
        homes = {k: v if item.rows is None else in_rows(v, item.rows) for k, v in bulk.items()}
        own = self._world.host.params[item.name]
        values = own if item.rows is None else in_rows(own, item.rows)
        return _Piece(item, homes, values, self._world.host.stores(item.name), self._slots[-1], trial)

    def _read(self, piece: _Piece) -> Event:
        """Start to read a piece; before the first update there is no state."""
        if piece.trial is not None and not piece.trial.is_wanted():
            return _NOTHING
        homes = [*piece.homes.values(), *([piece.values] if piece.in_files else [])]
        stored = [self._stored(home) for home in homes]
        memory = piece.slot.take(stored, [home.numel() * home.element_size() for home in homes]) if homes else []
        parts = [raw.view(home.dtype).as_strided(home.shape, home.stride()) for home, raw in zip(homes, memory)]
        piece.tensors = dict(zip(piece.homes, parts))
        piece.param = parts[-1] if piece.in_files else piece.values
        reads = _begun(partial(source.read, raw, 0) for source, raw in zip(stored, memory))
        return UnderWay(f"the read of the {piece.item.words} from its files", reads)

    def update(self, work: _Work) -> None:
        """Update the rows of a piece, on a worker."""
        host, item, name = self._world.host, work.piece.item, work.piece.item.name
        grad, known = work.grad, host.states.setdefault(name, {})
        # The writes of earlier pieces may add parts meanwhile.
        shared = {key: value for key, value in list(known.items()) if not is_bulk(value)}
        if not work.last:  # what all rows share advances once, with the last rows
            shared = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in shared.items()}
        state: dict[str, object] = {**shared, **work.piece.tensors}
        work.passing.begun = True
        rows = grad if item.rows is None else in_rows(grad, item.rows)
        work.make(name, work.piece.param, rows, state, work.scale)
        work.piece.tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and is_bulk(v)}
        work.piece.updated = True
        if not work.last:
            return
        known.update({key: value for key, value in state.items() if not is_bulk(value)})
        host.updates[name] = host.updates.get(name, 0) + 1

    def _write(self, piece: _Piece) -> Event:
        """Start to write a piece, if it has been updated."""
        if not piece.updated:
            return _NOTHING
        homes = self._states.homes(piece.item, piece.tensors)
        keeping = piece.trial.earlier if piece.trial is not None else None
        flat = {key: as_in_file(piece.item.name, key, tensor, homes[key]) for key, tensor in piece.tensors.items()}
        starts = [partial(self._stored(homes[key]).write, own, 0, (), keeping) for key, own in flat.items()]
        if piece.in_files:
            own = as_in_file(piece.item.name, "values", piece.param, piece.values)
            starts.append(partial(self._stored(piece.values).write, own, 0))
        writes = _begun(starts)
        return UnderWay(f"the write of the {piece.item.words} to its files", writes)

    def _stored(self, home: torch.Tensor) -> StoredBytes:
        store = self._world.host.store
        stored = store.bytes_of(home) if store is not None else None
        assert stored is not None, "it lies in files"
        return stored

    def has_failed(self, name: str) -> bool:
        """Return whether it is known that a piece of a parameter's update was not updated, or not written."""
        return any(event.done() and _failure(event) is not None for event in self._passing[name].events)

    def ended(self, name: str) -> Event:
        """Return the event of a parameter's update, and its writes, having ended, whether or not they have failed."""
        return Ended(tuple(self._passing[name].events))

    def comes_after(self, name: str, undone: Event) -> None:
        """Let the next update of a parameter come after the one before it was undone."""
        # What the undone one came after may have failed, which it does not make good.
        for item in self._states.items(name):
            earlier = (self._passing[name].found[item],) if item in self._passing[name].found else ()
            what = UnderWay(f"putting back the {item.words} in its files", (undone, *earlier))
            self._world.contents.written[item] = what

    def undone(self, name: str) -> None:
        """Note that an update of a parameter has ended and was undone."""
        passing = self._passing.get(name)
        if passing is None or not passing.tried:  # that has been noted
            return
        del self._passing[name]
        if passing.before is not None:
            self._passing[name] = passing.before
        for item in self._states.items(name):
            self._world.contents.written.pop(item, None)
        self._world.contents.written.update(passing.found)

    def broke(self, name: str) -> None:
        """Note that the state that a parameter had before an update could not be put back."""
        self._broken.add(name)

    def lost(self) -> frozenset[str]:
        """Wait for all updates, and return the parameters of which one was made in part or left no state in files."""
        found = set(self._broken)
        for name, passing in self._passing.items():
            failures = [error for event in passing.events if (error := _failure(event)) is not None]
            on_disk = any(isinstance(cause, StorageError) for error in failures for cause in (error, error.__cause__))
            if on_disk or (failures and passing.begun):
                found.add(name)
        return frozenset(found)

    def clear(self) -> None:
        """Forget all updates; none may be under way."""
        self._passing.clear()
        self._broken.clear()
        self._slots = deque(_Slot() for _ in range(RING_PIECES))
        self._written.extend([_NOTHING] * RING_PIECES)
        self._updated = _NOTHING


@dataclass
class _Work:
    """The update of one piece, as a worker calls it."""

    ring: StateRing
    piece: _Piece
    passing: _Passing
    make: Update
    grad: torch.Tensor
    scale: torch.Tensor | None
    last: bool

    def __call__(self) -> None:
        trial = self.piece.trial
        if trial is None:
            self.ring.update(self)
            return
        if not trial.goes_on():
            return
        try:
            self.ring.update(self)
        except BaseException:
            if not trial.forgives():
                raise
        else:
            if self.last:
                trial.made()


def _begun(starts: Iterable[Callable[[], Event]]) -> tuple[Event, ...]:
    """Start all of these; if one cannot be started, those before it have ended when this raises."""
    events: list[Event] = []
    try:
        for start in starts:
            events.append(start())
    except BaseException:
        Ended(tuple(events)).synchronize()
        raise
    return tuple(events)


def _failure(event: Event) -> Exception | None:
    try:
        event.synchronize()
    except Exception as error:
        return error
    return None
