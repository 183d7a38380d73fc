"""What is known of the chunks of a stored tensor: where they lie, what was written of them, and their checksums."""

from __future__ import annotations

import threading
from typing import Protocol

from ...errors import StorageError
from .chunks import Chunks
from .host_bytes import round_up
from .open_file import OpenFile
from .ranges import Range, joined, within
from .spread import Place, Spread


class Shown(Protocol):
    """Memory that shows the bytes of a stored tensor, since its files are mapped there."""

    def address(self, first: int) -> int:
        """Return where a byte is."""
        ...

    def show(self, place: Place, first: int, n_bytes: int, file: OpenFile, *, follows: bool = True) -> None:
        """Show bytes from their new place; the file `follows` what is written to the memory.

        Raises: StorageError if the system refuses.
        """
        ...

    def was_edited(self, first: int, n_bytes: int, expected: int) -> bool:
        """Return whether bytes that are kept in a file, and have a checksum there, were written to in memory."""
        ...


class StoredChunks:
    """The chunks of a stored tensor.

    State: `_written`, by chunk, the ranges that have been written; `_checksums` of the chunks; both are changed under
    `_lock`. `places`; `shown`, set when the tensor is mapped.

    Parameters
    ----------
    name: of the tensor, for messages. chunks: how it is cut. places: where they lie.
    """

    def __init__(self, name: str, chunks: Chunks, places: Spread) -> None:
        self.name, self.chunks, self.places = name, chunks, places
        self.shown: Shown | None = None
        self._written: dict[int, list[Range]] = {}
        self._checksums: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.chunks.n_bytes

    def was_edited(self, chunk: int) -> bool:
        """Return whether a chunk in a kept file was changed in memory, which the file does not follow."""
        expected = self.written(chunk)[1]
        if self.shown is None or expected is None or not self.places.is_kept(chunk):
            return False
        first, last = self.chunks.range_of(chunk)
        return self.shown.was_edited(first, round_up(last - first), expected)

    def note_mapped(self, chunk: int, start: int, end: int) -> None:
        """Note that those of a chunk's bytes that are in a range were written through a mapping of its file."""
        with self._lock:
            new = within([(start, end)], *self.chunks.range_of(chunk))
            self._written[chunk] = joined([*self._written.get(chunk, ()), *new])
            self._checksums.pop(chunk, None)

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
        """Note where a chunk was written, and let memory show it from there.

        Raises: StorageError if the system does not map it.
        """
        if place == self.places[chunk]:
            return
        if self.shown is not None:
            first, last = self.chunks.range_of(chunk)
            kept = self.places.keeps(place.file)
            self.shown.show(place, first, round_up(last - first), file, follows=not kept)
        self.places.move(chunk, place)

    def put_back(self, chunk: int, place: Place, written: list[Range], found: int | None) -> None:
        """Let a chunk have again what it had, which is still in its place there.

        Raises: StorageError if the system does not map it. Then nobody knows what the chunk holds.
        """
        try:
            if place != self.places[chunk]:
                file = place.file.open()
                try:
                    self.moved(chunk, place, file)
                finally:
                    file.close()
        except BaseException:
            self.lose(chunk)
            raise
        self.lose(chunk)
        with self._lock:
            if written:
                self._written[chunk] = written
            if found is not None:
                self._checksums[chunk] = found
