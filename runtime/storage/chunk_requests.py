"""The requests for one chunk of a stored tensor."""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch

from ...errors import StorageError
from .checksums import checksum
from .earlier import Earlier
from .host_bytes import ALIGNMENT_BYTES, AlignedBytes, copy, round_up
from .ranges import first_missing, without
from .spread import Place
from .stored_chunks import StoredChunks
from .stored_file import OpenFiles
from .transfers import Worker


class Route(NamedTuple):
    """Where a request finds a chunk, and where it writes the chunk to."""

    source: Place
    target: Place


class ChunkRequest(abc.ABC):
    """A request for one chunk.

    Parameters
    ----------
    route: the chunk's places; what does not lie on the target's disk is not read. tensor: the host's memory. start:
        which byte of the stored tensor is its first.
    """

    def __init__(self, stored: StoredChunks, chunk: int, route: Route, tensor: torch.Tensor, start: int) -> None:
        self.stored, self.chunk, self.route, self.tensor, self.start = stored, chunk, route, tensor, start
        self.first, self.last = stored.chunks.range_of(chunk)
        self.disk_bytes = round_up(self.last - self.first)
        self.wanted = (max(self.first, start), min(self.last, start + tensor.numel()))

    def straight(self) -> int | None:
        """Return the address of the chunk in the tensor, if all of it is there and aligned; else None."""
        address = self.tensor.data_ptr() + self.first - self.start
        whole = self.wanted == (self.first, self.last) and self.disk_bytes == self.last - self.first
        return address if whole and address % ALIGNMENT_BYTES == 0 else None

    @abc.abstractmethod
    def __call__(self, worker: Worker, files: OpenFiles) -> None:
        """Do it."""

    def check_edits(self) -> None:
        """Raise StorageError if the chunk was changed in memory, and its file was not told."""
        shown = self.stored.shown
        own = shown is not None and self.tensor.data_ptr() - self.start == shown.address(0)
        if not own and self.stored.was_edited(self.chunk):
            raise self._differs("memory that it is mapped to was written to, and a checkpoint keeps the file as it is")

    def read_chunk(self, worker: Worker, files: OpenFiles, address: int, expected: int | None) -> None:
        """Read the chunk into memory and verify it, if it has a checksum."""
        place = self.route.source
        worker.read(files.of(place.file), address, self.disk_bytes, place.offset, self.disk_bytes)
        if expected is not None and checksum(address, self.disk_bytes) != expected:
            raise self._differs("the checksums differ")

    def _differs(self, why: str) -> StorageError:
        file, offset = self.route.source
        return StorageError(
            f"{file.path} does not hold what was written, between offsets {offset} and {offset + self.disk_bytes} "
            f"({self.stored.name}, bytes {self.first} to {self.last}): {why}. The disk or its "
            "connection has a fault, or another program wrote into the file. Look at the system's log (dmesg), use "
            "another disk, and go on from the last checkpoint"
        )

    def wanted_in(self, buffer: AlignedBytes) -> tuple[int, int, int]:
        """Return the address of the wanted bytes in the tensor and in the buffer, and their number."""
        first, last = self.wanted
        return self.tensor.data_ptr() + first - self.start, buffer.address + first - self.first, last - first


class Read(ChunkRequest):
    def __call__(self, worker: Worker, files: OpenFiles) -> None:
        written, expected = self.stored.written(self.chunk)
        missing = first_missing(written, *self.wanted)
        if missing is not None:
            raise self.stored.never_written(missing, self.wanted)
        self.check_edits()
        address = self.straight()
        self.read_chunk(worker, files, worker.buffer.address if address is None else address, expected)
        if address is None:
            target, source, n_bytes = self.wanted_in(worker.buffer)
            copy(target, source, n_bytes)


class Seal(ChunkRequest):
    def __call__(self, worker: Worker, files: OpenFiles) -> None:
        written, _ = self.stored.written(self.chunk)
        self.read_chunk(worker, files, worker.buffer.address, None)
        self.stored.note(self.chunk, written, checksum(worker.buffer.address, self.disk_bytes))


class Write(ChunkRequest):
    """A write; what the chunk has before is noted in `keeping`."""

    def __init__(
        self,
        stored: StoredChunks,
        chunk: int,
        route: Route,
        tensor: torch.Tensor,
        start: int,
        keeping: Earlier | None = None,
    ) -> None:
        super().__init__(stored, chunk, route, tensor, start)
        self.keeping = keeping

    def __call__(self, worker: Worker, files: OpenFiles) -> None:
        self.check_edits()
        address = self.straight()
        written, _ = self.stored.written(self.chunk)
        if address is None:
            self._prepare(worker, files)
            address = worker.buffer.address
        found = checksum(address, self.disk_bytes)
        if self.keeping is not None:
            self.keeping.note(self.stored, self.chunk)
        try:
            place = self.route.target
            file = files.of(place.file)
            worker.write(file, address, self.disk_bytes, place.offset)
            self.stored.moved(self.chunk, place, file)
        except BaseException:
            self.stored.lose(self.chunk)
            raise
        self.stored.note(self.chunk, [*written, self.wanted], found)

    def _prepare(self, worker: Worker, files: OpenFiles) -> None:
        """Put together in the buffer what the chunk will hold; bytes that nobody has written may be anything."""
        written, expected = self.stored.written(self.chunk)
        if without(written, *self.wanted):
            self.read_chunk(worker, files, worker.buffer.address, expected)
        source, target, n_bytes = self.wanted_in(worker.buffer)
        copy(target, source, n_bytes)
