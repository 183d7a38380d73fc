"""One stored tensor: where its bytes lie, what was written, and the requests that read and write them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...errors import ArgumentValueError, StorageError
from ..events import Event
from .chunk_requests import ChunkRequest, Read, Route, Seal, Write
from .chunks import Chunks
from .earlier import Earlier
from .ranges import Range, first_missing, within
from .spread import Place, Spread
from .stored_chunks import StoredChunks
from .stored_file import OpenFiles
from .transfers import Part, Queue, Request


@dataclass(frozen=True)
class _UnderWay:
    """A transfer that may not have ended, and where it writes to.

    Parameters
    ----------
    bytes_of: those of the tensor that it reads or writes. touches: these and the rest of chunks that it writes to
        another place, which nobody else may use meanwhile.
    event: held by those who carry the transfer out, until it has ended. It is weak, since the error of one that failed
        has the frames of all that waited for it, and with them tensors whose memory is known by what has this.
    """

    bytes_of: Range
    touches: Range
    writes: bool
    event: weakref.ref[Event]
    written_to: Mapping[int, Place] = field(default_factory=dict)


class Stored(StoredChunks):
    """The bytes of one tensor, cut into chunks that lie on one or more paths.

    A chunk is written and read by one request and has one checksum. So a transfer of a range that begins or ends within
    a chunk reads all of it, and a write writes all of it again; ranges of whole chunks cost nothing beyond their bytes.

    State: that of its chunks, and `_under_way`, transfers that later ones may have to wait for, changed under
    `_ordering`.

    Parameters
    ----------
    name: of the tensor, for messages. chunks: how it is cut. places: where they lie. give_back: gives their space back.
        It is called once: when neither the engine, nor a transfer, nor anybody else holds this object any more, or
        earlier by whoever knows that nobody will use it again.
    """

    def __init__(self, name: str, chunks: Chunks, places: Spread, give_back: Callable[[], None]) -> None:
        super().__init__(name, chunks, places)
        self.give_back = weakref.finalize(self, give_back)
        self.give_back.atexit = False  # the engine removes its files then
        self._under_way: list[_UnderWay] = []
        self._ordering = threading.Lock()

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that it lies in."""
        return tuple(file.path for file in self.places.files())

    def transfer(
        self,
        tensor: torch.Tensor,
        start: int,
        writes: bool,
        submit: Callable[[list[Part], tuple[Event, ...]], Event],
        keeping: Earlier | None = None,
    ) -> Event:
        """Submit a transfer of the bytes from an offset, after those submitted before that touch the same bytes.

        Parameters
        ----------
        keeping: what a write replaces stays, and is noted here.

        Raises: StorageError for a read of bytes that nobody has written and nobody is going to.
        """
        wanted = (start, start + tensor.numel())
        with self._ordering:
            self._under_way = self._not_done()
            if not writes:
                self._check_written(wanted, [one.bytes_of for one in self._under_way if one.writes])
            routes = self._routes(wanted, writes, keeping)
            touches = self._touched(wanted, routes)
            earlier = [one for one in self._under_way if (writes or one.writes) and within([one.touches], *touches)]
            event = submit(self._parts(tensor, start, writes, routes, keeping), _events(earlier))
            goes_to = {chunk: route.target for chunk, route in routes.items()} if writes else {}
            self._under_way.append(_UnderWay(wanted, touches, writes, weakref.ref(event), goes_to))
        return event

    def forget(self, start: int, end: int) -> list[int]:
        """Note that bytes were written through a mapping of the files.

        They count as written from now on. The chunks that hold them have no checksum until they are written again by a
        transfer, and until then reads of these chunks are not verified. Chunks in files that are kept stay as they are
        there.

        Parameters
        ----------
        start, end: offset in bytes of the first one, and the one behind the last.

        Returns: the chunks in kept files that have to be written from memory, since they were changed there, or since
        writing them has failed.
        Raises: ArgumentValueError for bytes that the tensor does not have. StorageError if a transfer of the same
        chunks has not ended. It may have read or written them before or after the mapping did, and nobody knows.
        """
        if not 0 <= start <= end <= self.n_bytes:
            raise ArgumentValueError(f"bytes {start} to {end} are not within {self.name}, which has {self.n_bytes}")
        chunks = self.chunks.within(start, end)
        if not chunks:
            return []
        touched = (self.chunks.range_of(chunks[0])[0], self.chunks.range_of(chunks[-1])[1])
        with self._ordering:
            self._under_way = self._not_done()
            for one in self._under_way:
                if within([one.touches], *touched):
                    raise self._still_transferred((start, end), one)
            edited = []
            for chunk in chunks:
                if not self.places.is_kept(chunk):
                    self.note_mapped(chunk, start, end)
                elif self.written(chunk)[1] is None or self.was_edited(chunk):
                    edited.append(chunk)
        return edited

    def seal(self, submit: Callable[[list[Part], tuple[Event, ...]], Event]) -> Event:
        """Submit reads of the chunks that no checksum verifies, after which each chunk has one.

        Raises: StorageError if not all of the tensor has been written.
        """
        with self._ordering:
            self._under_way = self._not_done()
            self._check_written((0, self.n_bytes), [one.bytes_of for one in self._under_way if one.writes])
            unknown = [chunk for chunk in range(len(self.chunks)) if self.written(chunk)[1] is None]
            routes = {chunk: Route(self.places[chunk], self.places[chunk]) for chunk in unknown}
            nothing = torch.empty(0, dtype=torch.uint8)
            parts = _parts_of({chunk: Seal(self, chunk, route, nothing, 0) for chunk, route in routes.items()})
            return submit(parts, _events(self._under_way))

    def wait(self) -> None:
        """Wait for all transfers. What fails in one raises."""
        with self._ordering:
            under_way = _events(self._not_done())
        for event in under_way:
            event.synchronize()

    def _not_done(self) -> list[_UnderWay]:
        return [one for one in self._under_way if (event := one.event()) is not None and not event.done()]

    def _still_transferred(self, mapped: Range, transfer: _UnderWay) -> StorageError:
        first, last = transfer.bytes_of
        return StorageError(
            f"bytes {mapped[0]} to {mapped[1]} of {self.name} were written in memory while the engine "
            f"{'wrote' if transfer.writes else 'read'} bytes {first} to {last}, which lie in the same chunks, so that "
            "either may have been first; wait for the transfer before you write to the tensor"
        )

    def _routes(self, wanted: Range, writes: bool, keeping: Earlier | None) -> dict[int, Route]:
        """Return where a transfer finds the chunks that it touches, and where it puts them.

        All transfers of a chunk under way are before one that writes all of it, and those to come wait for that one. So
        it may put the chunk on another path.

        Raises: StorageError if a path has too little space for what may not stay in its file.
        """
        soon = {chunk: place for one in self._under_way for chunk, place in one.written_to.items()}
        routes = {}
        for chunk in self.chunks.within(*wanted):
            first, last = self.chunks.range_of(chunk)
            found = soon.get(chunk, self.places[chunk])
            whole = wanted[0] <= first and last <= wanted[1]
            if not writes:
                routes[chunk] = Route(found, found)
            elif keeping is not None:
                routes[chunk] = Route(found, keeping.target(self, chunk, found, whole))
            elif whole:
                routes[chunk] = Route(found, self.places.target(chunk))
            else:
                routes[chunk] = Route(found, self.places.writable(found))
        return routes

    def _touched(self, wanted: Range, routes: Mapping[int, Route]) -> Range:
        """Return the bytes that a transfer wants, and all of the chunks that it writes to another place."""
        ends = [self.chunks.range_of(chunk) for chunk, route in routes.items() if route.source != route.target]
        return min([wanted[0], *(first for first, _ in ends)]), max([wanted[1], *(last for _, last in ends)])

    def _parts(
        self, tensor: torch.Tensor, start: int, writes: bool, routes: Mapping[int, Route], keeping: Earlier | None
    ) -> list[Part]:
        if not writes:
            return _parts_of({chunk: Read(self, chunk, route, tensor, start) for chunk, route in routes.items()})
        return _parts_of({chunk: Write(self, chunk, route, tensor, start, keeping) for chunk, route in routes.items()})

    def _check_written(self, wanted: Range, soon: list[Range]) -> None:
        written = [piece for chunk in self.chunks.within(*wanted) for piece in self.written(chunk)[0]]
        missing = first_missing(written + soon, *wanted)
        if missing is not None:
            raise self.never_written(missing, wanted)


def _events(transfers: Iterable[_UnderWay]) -> tuple[Event, ...]:
    """Return the events of transfers that have not ended."""
    return tuple(event for one in transfers if (event := one.event()) is not None)


def _parts_of(work: Mapping[int, ChunkRequest]) -> list[Part]:
    """Return the parts of a transfer, one for each disk."""
    by_disk: dict[Queue, list[Request]] = {}
    for chunk, one in work.items():
        by_disk.setdefault(one.route.target.file.queue, []).append(Request((one.stored, chunk), one))
    return [Part(queue, requests, OpenFiles) for queue, requests in by_disk.items()]
