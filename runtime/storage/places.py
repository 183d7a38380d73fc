"""Where the chunks of a stored tensor lie, and how they leave files that a checkpoint keeps."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .folders import Folder
from .stored_file import StoredFile


class Place(NamedTuple):
    """A file, and the offset in bytes of a chunk in it."""

    file: StoredFile
    offset: int


class Places:
    """The place of each chunk, by number.

    A file that is kept is never written again. What is written next to one of its chunks goes to another file on the
    same path, at the same offset, and the chunk then lies there. A kept file that has no chunk any more loses its name.

    State: `_of`, by chunk; `_kept`, the files that are never written again; `_next`, by folder the file that is written
    instead; `held`, all files that have a name. They are changed under `_lock`.

    Parameters
    ----------
    places: of the chunks. held: gets and loses files as they are made and removed.
    """

    def __init__(self, places: Sequence[tuple[StoredFile, int]], held: set[StoredFile]) -> None:
        self._of = [Place(*place) for place in places]
        self._count = Counter(place.file for place in self._of)
        self._kept: set[StoredFile] = set()
        self._next: dict[Folder, StoredFile] = {}
        self.held, self._lock = held, threading.Lock()

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Place]:
        return iter(tuple(self._of))

    def __getitem__(self, chunk: int) -> Place:
        return self._of[chunk]

    def files(self) -> tuple[StoredFile, ...]:
        """Return the files that any chunk lies in."""
        return tuple(dict.fromkeys(place.file for place in self))

    def is_kept(self, chunk: int) -> bool:
        """Return whether a chunk lies in a file that is never written again."""
        return self._of[chunk].file in self._kept

    def keep(self, files: Sequence[StoredFile]) -> None:
        """Let files of chunks never be written again."""
        with self._lock:
            self._kept.update(files)
            self._next = {folder: file for folder, file in self._next.items() if file not in self._kept}

    def make_room(self) -> None:
        """Reserve now the files that will be written instead of those that are kept.

        Raises: StorageError if a path has too little space.
        """
        with self._lock:
            for file in tuple(self._kept):
                self._instead_of(file)

    def target(self, chunk: int) -> Place:
        """Return where a chunk is to be written. Raises: StorageError if a path has too little space for its file."""
        place = self._of[chunk]
        with self._lock:
            return place if place.file not in self._kept else Place(self._instead_of(place.file), place.offset)

    def move(self, chunk: int, place: Place) -> None:
        """Note where a chunk was written."""
        with self._lock:
            before, self._of[chunk] = self._of[chunk].file, place
            self._count[place.file] += 1
            self._count[before] -= 1
            left = before in self._kept and not self._count[before]
            if left:
                self._kept.discard(before)
                self.held.discard(before)
        if left:
            before.remove()

    def _instead_of(self, file: StoredFile) -> StoredFile:
        if file.folder not in self._next:
            self._next[file.folder] = file.another()
            self.held.add(self._next[file.folder])
        return self._next[file.folder]
