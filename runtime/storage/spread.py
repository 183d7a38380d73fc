"""Where the chunks of a stored tensor lie: one place at most on each path, which stays reserved for the chunk."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...errors import StorageError
from .folders import Folder
from .homes import Home
from .host_bytes import round_up
from .stored_file import StoredFile

log = logging.getLogger("offmate")


class Place(NamedTuple):
    """A file, and the offset in bytes at which a chunk begins in it."""

    file: StoredFile
    offset: int


class Spread:
    """The places of a tensor's chunks.

    A chunk that is to lie on another path moves when all of it is written next. Its place on the old path stays
    reserved for it, so that it can always come back.

    State: `paths`, by chunk, the path that it lies on or moves to; `_reserved`, by chunk and path, its place there;
    `_now`, by chunk, the place that has its bytes; `_files`. They grow under the engine's lock, and an entry of `_now`
    is set by the thread that has written the chunk.

    Parameters
    ----------
    sizes: bytes of the chunks. homes: the paths. paths: by chunk, the path that it lies on.

    Raises: StorageError if a path has too little space; nothing is reserved then.
    """

    def __init__(self, sizes: Sequence[int], homes: Sequence[Home], paths: Sequence[int]) -> None:
        self.sizes, self._homes = tuple(sizes), homes
        self._reserved: dict[tuple[int, int], Place] = {}
        self._files: list[tuple[Folder, StoredFile]] = []
        try:
            for path in range(len(homes)):
                self._reserve([chunk for chunk, own in enumerate(paths) if own == path], path)
        except BaseException:
            for folder, file in self._files:
                folder.remove(file.path)
            raise
        self.paths = tuple(paths)
        self._now = [self._reserved[chunk, path] for chunk, path in enumerate(paths)]

    def __len__(self) -> int:
        return len(self._now)

    def __iter__(self) -> Iterator[Place]:
        return iter(tuple(self._now))

    def __getitem__(self, chunk: int) -> Place:
        """Return the place that has a chunk's bytes."""
        return self._now[chunk]

    def target(self, chunk: int) -> Place:
        """Return the place that all of a chunk is written to next."""
        return self._reserved[chunk, self.paths[chunk]]

    def moved(self, chunk: int, place: Place) -> None:
        """Note that a chunk was written to a place."""
        self._now[chunk] = place

    def lacking_bytes(self, paths: Sequence[int], path: int) -> int:
        """Return the bytes that are not reserved yet on a path if the chunks are to lie on these paths."""
        return sum(round_up(self.sizes[chunk]) for chunk in self._lacking(paths, path))

    def send(self, paths: Sequence[int]) -> None:
        """Let chunks move to other paths.

        Raises: StorageError if a path has too little space; then they lie and move as before.
        """
        for path in range(len(self._homes)):
            self._reserve(self._lacking(paths, path), path)
        self.paths = tuple(paths)

    @property
    def reserved_bytes(self) -> Mapping[int, int]:
        """Return the bytes that are reserved on each path, by its number."""
        found = dict.fromkeys(range(len(self._homes)), 0)
        for chunk, path in self._reserved:
            found[path] += round_up(self.sizes[chunk])
        return found

    def give_back(self) -> None:
        """Remove all files; nobody may use them any more."""
        for folder, file in self._files:
            try:
                folder.remove(file.path)
            except StorageError as error:  # nobody waits for it who could be told
                log.warning("space that is no longer used stays taken until training ends: %s", error)

    def _lacking(self, paths: Sequence[int], path: int) -> list[int]:
        return [chunk for chunk, own in enumerate(paths) if own == path and (chunk, path) not in self._reserved]

    def _reserve(self, chunks: Sequence[int], path: int) -> None:
        """Reserve places for chunks in one file, in their order. Raises: StorageError if there is too little space."""
        if not chunks:
            return
        folder, queue = self._homes[path]
        name = folder.reserve(sum(round_up(self.sizes[chunk]) for chunk in chunks))
        file = StoredFile(name, queue, lambda: folder.open(name))
        self._files.append((folder, file))
        offset = 0
        for chunk in chunks:
            self._reserved[chunk, path] = Place(file, offset)
            offset += round_up(self.sizes[chunk])
