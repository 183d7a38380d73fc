"""One stored tensor: where its bytes lie, what was written, and the requests that read and write them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ...errors import ArgumentValueError, StorageError
from ..events import Event
from .checksums import checksum
from .chunks import Chunks
from .host_bytes import ALIGNMENT_BYTES, AlignedBytes, copy, round_up
from .open_file import OpenFile
from .ranges import Range, first_missing, joined, within, without
from .spread import Place, Spread
from .stored_file import StoredFile
from .transfers import Part, Request, Worker


class Shown(Protocol):
    """Memory that shows the bytes of a stored tensor, since its files are mapped there."""

    def show(self, file: OpenFile, offset: int, first: int, n_bytes: int) -> None:
        """Show bytes from an offset in a file. Raises: StorageError if the system refuses.

        Parameters
        ----------
        first: which byte of the tensor is the first one. n_bytes: whole pages.
        """
        ...


@dataclass(frozen=True)
class _UnderWay:
    """A transfer that may not have ended, the bytes that it reads or writes, and where chunks will lie after it."""

    bytes_of: Range
    writes: bool
    event: Event
    written_to: dict[int, Place]


class Stored:
    """The bytes of one tensor, cut into chunks that lie on one or more paths.

    A chunk is written and read by one request and has one checksum. So a transfer of a range that begins or ends within
    a chunk reads all of it, and a write writes all of it again; ranges of whole chunks cost nothing beyond their bytes.

    State: `_written`, by chunk, the ranges that have been written; `_checksums` of the chunks; both are changed under
    `_lock`. `_under_way`, transfers that later ones may have to wait for, changed under `_ordering`. `places`; `shown`,
    set when the tensor is mapped.

    Parameters
    ----------
    name: of the tensor, for messages. chunks: how it is cut. places: of the chunks.
    give_back: gives its space back. It is called once: when neither the engine, nor a transfer, nor anybody else holds
        this object any more, or earlier by whoever knows that nobody will use it again.
    """

    def __init__(self, name: str, chunks: Chunks, places: Spread, give_back: Callable[[], None]) -> None:
        self.name, self.chunks, self.places = name, chunks, places
        self.shown: Shown | None = None
        self.give_back = weakref.finalize(self, give_back)
        self.give_back.atexit = False  # the engine removes its files then
        self._written: dict[int, list[Range]] = {}
        self._checksums: dict[int, int] = {}
        self._lock = threading.Lock()
        self._under_way: list[_UnderWay] = []
        self._ordering = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.chunks.n_bytes

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that it lies in, one or more for each path."""
        return tuple(dict.fromkeys(file.path for file, _ in self.places))

    def transfer(
        self,
        tensor: torch.Tensor,
        start: int,
        writes: bool,
        submit: Callable[[list[Part], tuple[Event, ...]], Event],
    ) -> Event:
        """Submit a transfer of the bytes from an offset, after those submitted before that touch the same bytes.

        Raises: StorageError for a read of bytes that nobody has written and nobody is going to.
        """
        wanted = (start, start + tensor.numel())
        with self._ordering:
            self._under_way = self._not_done()
            if not writes:
                self._check_written(wanted, [one.bytes_of for one in self._under_way if one.writes])
            earlier = [
                one.event for one in self._under_way if (writes or one.writes) and within([one.bytes_of], *wanted)
            ]
            places = self._places(wanted, writes)
            event = submit(self._parts(tensor, start, writes, places), tuple(earlier))
            self._under_way.append(_UnderWay(wanted, writes, event, places if writes else {}))
        return event

    def forget(self, start: int, end: int) -> None:
        """Note that bytes were written through a mapping of the files.

        They count as written from now on. The chunks that hold them have no checksum until they are written again by a
        transfer, and until then reads of these chunks are not verified.

        Parameters
        ----------
        start, end: offset in bytes of the first one, and the one behind the last.

        Raises: ArgumentValueError for bytes that the tensor does not have. StorageError if a transfer of the same
        chunks has not ended. It may have read or written them before or after the mapping did, and nobody knows.
        """
        if not 0 <= start <= end <= self.n_bytes:
            raise ArgumentValueError(f"bytes {start} to {end} are not within {self.name}, which has {self.n_bytes}")
        chunks = self.chunks.within(start, end)
        if not chunks:
            return
        touched = (self.chunks.range_of(chunks[0])[0], self.chunks.range_of(chunks[-1])[1])
        with self._ordering:
            self._under_way = self._not_done()
            for one in self._under_way:
                if within([one.bytes_of], *touched):
                    raise self._still_transferred((start, end), one)
            with self._lock:
                for chunk in chunks:
                    new = within([(start, end)], *self.chunks.range_of(chunk))
                    self._written[chunk] = joined([*self._written.get(chunk, ()), *new])
                    self._checksums.pop(chunk, None)

    def _not_done(self) -> list[_UnderWay]:
        return [one for one in self._under_way if not one.event.done()]

    def _still_transferred(self, mapped: Range, transfer: _UnderWay) -> StorageError:
        first, last = transfer.bytes_of
        return StorageError(
            f"bytes {mapped[0]} to {mapped[1]} of {self.name} were written in memory while the engine "
            f"{'wrote' if transfer.writes else 'read'} bytes {first} to {last}, which lie in the same chunks, so that "
            "either may have been first; wait for the transfer before you write to the tensor"
        )

    def _places(self, wanted: Range, writes: bool) -> dict[int, Place]:
        """Return where a transfer finds the chunks that it touches, or puts them.

        All transfers of a chunk under way are before one that writes all of it, and those to come wait for that one. So
        it may put the chunk elsewhere.
        """
        soon = {chunk: place for one in self._under_way for chunk, place in one.written_to.items()}
        places = {}
        for chunk in self.chunks.within(*wanted):
            first, last = self.chunks.range_of(chunk)
            whole = writes and wanted[0] <= first and last <= wanted[1]
            places[chunk] = self.places.target(chunk) if whole else soon.get(chunk, self.places[chunk])
        return places

    def _parts(self, tensor: torch.Tensor, start: int, writes: bool, places: dict[int, Place]) -> list[Part]:
        by_file: dict[StoredFile, list[Request]] = {}
        kind = _Write if writes else _Read
        for chunk, place in places.items():
            by_file.setdefault(place.file, []).append(Request((self, chunk), kind(self, chunk, place, tensor, start)))
        return [Part(file.queue, requests, file.open) for file, requests in by_file.items()]

    def _check_written(self, wanted: Range, soon: list[Range]) -> None:
        with self._lock:
            written = [piece for chunk in self.chunks.within(*wanted) for piece in self._written.get(chunk, ())]
        missing = first_missing(written + soon, *wanted)
        if missing is not None:
            raise self.never_written(missing, wanted)

    def never_written(self, missing: int, wanted: Range) -> StorageError:
        """Return the error of a read of bytes that were not written, or not wholly."""
        chunk = self.chunks.at(missing)
        file, offset = self.places[chunk]
        place = offset + missing - self.chunks.range_of(chunk)[0]
        return StorageError(
            f"byte {missing} of {self.name} was read (bytes {wanted[0]} to {wanted[1]} of {self.n_bytes}), but it was "
            f"never written, or writing it failed ({file.path}, offset {place}); write it first, and look at what the "
            "writes raised"
        )

    def written(self, chunk: int) -> tuple[list[Range], int | None]:
        """Return which bytes of a chunk have been written, and its checksum; None if nothing verifies it."""
        with self._lock:
            return self._written.get(chunk, []), self._checksums.get(chunk)

    def lose(self, chunk: int) -> None:
        """Note that writing a chunk failed, so that nobody knows what it holds."""
        with self._lock:
            self._written.pop(chunk, None)
            self._checksums.pop(chunk, None)

    def note(self, chunk: int, written: list[Range], found: int) -> None:
        """Note that a chunk has been written."""
        with self._lock:
            self._written[chunk], self._checksums[chunk] = joined(written), found

    def moved(self, chunk: int, place: Place, file: OpenFile) -> None:
        """Note where a chunk was written, and let memory that shows the tensor show it from there.

        Raises: StorageError if the system does not map it.
        """
        if place == self.places[chunk]:
            return
        if self.shown is not None:
            first, last = self.chunks.range_of(chunk)
            self.shown.show(file, place.offset, first, round_up(last - first))
        self.places.moved(chunk, place)


class _ChunkRequest:
    """A request for one chunk.

    Parameters
    ----------
    place: of the chunk, which it is read from or written to. tensor: the host's memory. start: which byte of the stored
        tensor is its first.
    """

    def __init__(self, stored: Stored, chunk: int, place: Place, tensor: torch.Tensor, start: int) -> None:
        self.stored, self.chunk, self.place, self.tensor, self.start = stored, chunk, place, tensor, start
        self.first, self.last = stored.chunks.range_of(chunk)
        self.disk_bytes = round_up(self.last - self.first)
        self.wanted = (max(self.first, start), min(self.last, start + tensor.numel()))

    def straight(self) -> int | None:
        """Return the address of the chunk in the tensor, if all of it is there and aligned; else None."""
        address = self.tensor.data_ptr() + self.first - self.start
        whole = self.wanted == (self.first, self.last) and self.disk_bytes == self.last - self.first
        return address if whole and address % ALIGNMENT_BYTES == 0 else None

    def read_chunk(self, worker: Worker, file: OpenFile, address: int, expected: int | None) -> None:
        """Read the chunk into memory and verify it, if it has a checksum."""
        offset = self.place.offset
        worker.read(file, address, self.disk_bytes, offset, self.disk_bytes)
        if expected is not None and checksum(address, self.disk_bytes) != expected:
            raise StorageError(
                f"{file.path} does not hold what was written, between offsets {offset} and {offset + self.disk_bytes} "
                f"({self.stored.name}, bytes {self.first} to {self.last}): the checksums differ. The disk or its "
                "connection has a fault, or another program wrote into the file. Look at the system's log (dmesg), use "
                "another disk, and go on from the last checkpoint"
            )

    def wanted_in(self, buffer: AlignedBytes) -> tuple[int, int, int]:
        """Return the address of the wanted bytes in the tensor and in the buffer, and their number."""
        first, last = self.wanted
        return self.tensor.data_ptr() + first - self.start, buffer.address + first - self.first, last - first


class _Read(_ChunkRequest):
    def __call__(self, worker: Worker, file: OpenFile) -> None:
        written, expected = self.stored.written(self.chunk)
        missing = first_missing(written, *self.wanted)
        if missing is not None:
            raise self.stored.never_written(missing, self.wanted)
        address = self.straight()
        self.read_chunk(worker, file, worker.buffer.address if address is None else address, expected)
        if address is None:
            target, source, n_bytes = self.wanted_in(worker.buffer)
            copy(target, source, n_bytes)


class _Write(_ChunkRequest):
    def __call__(self, worker: Worker, file: OpenFile) -> None:
        address = self.straight()
        written, _ = self.stored.written(self.chunk)
        if address is None:
            self._prepare(worker, file)
            address = worker.buffer.address
        found = checksum(address, self.disk_bytes)
        try:
            worker.write(file, address, self.disk_bytes, self.place.offset)
            self.stored.moved(self.chunk, self.place, file)
        except BaseException:
            self.stored.lose(self.chunk)
            raise
        self.stored.note(self.chunk, [*written, self.wanted], found)

    def _prepare(self, worker: Worker, file: OpenFile) -> None:
        """Put together in the buffer what the chunk will hold; bytes that nobody has written may be anything."""
        written, expected = self.stored.written(self.chunk)
        if without(written, *self.wanted):
            self.read_chunk(worker, file, worker.buffer.address, expected)
        source, target, n_bytes = self.wanted_in(worker.buffer)
        copy(target, source, n_bytes)
