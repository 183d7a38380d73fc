"""What stored tensors had before some writes, which stays in its places until it is dropped or put back."""

from __future__ import annotations

import threading
from typing import NamedTuple

from .ranges import Range
from .spread import Place
from .stored_chunks import StoredChunks


class _Had(NamedTuple):
    """Where a chunk was, which of its bytes had been written, and its checksum."""

    place: Place
    written: list[Range]
    checksum: int | None


class Earlier:
    """The chunks that some writes have put elsewhere, so that what they had can be put back.

    State: `_had`, by tensor and chunk, what a request was the first to replace; `_sent`, where the first write that was
    submitted puts a chunk, which the next ones follow even if it fails; `over`, once it was dropped or put back.
    Changed under `_lock`.
    """

    def __init__(self) -> None:
        self._had: dict[tuple[StoredChunks, int], _Had] = {}
        self._sent: dict[tuple[StoredChunks, int], Place] = {}
        self.over = False
        self._lock = threading.Lock()

    def target(self, stored: StoredChunks, chunk: int, now: Place, whole: bool) -> Place:
        """Return where a write that is being submitted puts a chunk.

        It is another place even if the others were dropped meanwhile, so that a tensor stays in one file.

        Parameters
        ----------
        now: where the chunk lies once earlier writes have ended. whole: whether all of it is written.

        Raises: StorageError if there is too little space.
        """
        with self._lock:
            if (stored, chunk) not in self._sent:
                self._sent[stored, chunk] = stored.places.beside(chunk, now, moves=whole)
            return self._sent[stored, chunk]

    def note(self, stored: StoredChunks, chunk: int) -> None:
        """Remember what a chunk has; a request calls it before it writes."""
        with self._lock:
            if self.over or (stored, chunk) in self._had:
                return
            place = stored.places[chunk]
            stored.places.hold(place.file)
            self._had[stored, chunk] = _Had(place, *stored.written(chunk))

    def drop(self) -> None:
        """Let what the chunks had be written over."""
        for (stored, _), had in self._taken().items():
            stored.places.let_go(had.place.file)

    def put_back(self) -> None:
        """Let the chunks have again what they had. No write to them may be under way.

        Raises: StorageError if some cannot have it; the others have it then.
        """
        failures = []
        for (stored, chunk), had in self._taken().items():
            try:
                stored.put_back(chunk, *had)
            except Exception as error:
                failures.append(error)
            stored.places.let_go(had.place.file)
        if failures:
            raise failures[0]

    def _taken(self) -> dict[tuple[StoredChunks, int], _Had]:
        with self._lock:
            self.over = True
            found, self._had = self._had, {}
        return found
