"""Where the chunks of a stored tensor lie: one place at most on each path, which stays reserved for the chunk."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from .homes import Home
from .host_bytes import round_up
from .stored_file import StoredFile


class Place(NamedTuple):
    """A file, and the offset in bytes at which a chunk begins in it."""

    file: StoredFile
    offset: int


class Spread:
    """The places of a tensor's chunks.

    A chunk that is to lie on another path moves when all of it is written next. Its place on the old path stays
    reserved for it, so that it can always come back.

    A file that is kept is never written again. What is written next to one of its chunks goes to another file on the
    same path, at the same offset, and the chunk then lies there. A kept file loses its name once no chunk lies in it.

    A chunk may have a second place on its path, so that a write can leave what it has where it is. From then on it may
    lie in either.

    State: `paths`, by chunk, the path that it lies on or moves to; `_reserved`, by chunk and path, its place there, and
    `_second`, its second one, if it has one (`_twice`); `_now`, by chunk, the place that has its bytes, and `_count`,
    how many lie in each file, or hold it; `_kept`, the files that are never written again; `_origin`, by file that has
    a name, the number of the layout that it shares with those written instead of it, and `_next`, by that number, the
    file that is written instead of kept ones. `paths` and what is reserved for moves change under the engine's lock,
    all else under `_lock`.

    Parameters
    ----------
    sizes: bytes of the chunks. homes: the paths. paths: by chunk, the path that it lies on.

    Raises: StorageError if a path has too little space; nothing is reserved then.
    """

    def __init__(self, sizes: Sequence[int], homes: Sequence[Home], paths: Sequence[int]) -> None:
        self.sizes, self._homes = tuple(sizes), homes
        self._reserved: dict[tuple[int, int], Place] = {}
        self._second: dict[tuple[int, int], Place] = {}
        self._twice = False
        self._origin: dict[StoredFile, int] = {}
        self._next: dict[int, StoredFile] = {}
        self._kept: set[StoredFile] = set()
        self._lock = threading.Lock()
        self._origins = 0
        try:
            for path in range(len(homes)):
                self._reserve([chunk for chunk, own in enumerate(paths) if own == path], path, self._reserved)
        except BaseException:
            for file in self._origin:
                file.folder.remove(file.path)
            raise
        self.paths = tuple(paths)
        self._now = [self._reserved[chunk, path] for chunk, path in enumerate(paths)]
        self._count = Counter(place.file for place in self._now)

    def __len__(self) -> int:
        return len(self._now)

    def __iter__(self) -> Iterator[Place]:
        return iter(tuple(self._now))

    def __getitem__(self, chunk: int) -> Place:
        """Return the place that has a chunk's bytes."""
        return self._now[chunk]

    def files(self) -> tuple[StoredFile, ...]:
        """Return the files that any chunk lies in."""
        return tuple(dict.fromkeys(place.file for place in self))

    def target(self, chunk: int) -> Place:
        """Return the place that all of a chunk is written to next. Raises: StorageError as `writable`."""
        key, now = (chunk, self.paths[chunk]), self._now[chunk]
        return self.writable(now if now == self._second.get(key) else self._reserved[key])

    def beside(self, chunk: int, now: Place, moves: bool) -> Place:
        """Return the place that a chunk is written to if what it has is to stay.

        Parameters
        ----------
        now: where it lies, or will lie before that write. moves: whether it may go to another path.

        Raises: StorageError if the path has too little space for it.
        """
        here = next(path for path, home in enumerate(self._homes) if home.folder is now.file.folder)
        key = chunk, self.paths[chunk] if moves else here
        if self._reserved[key] != now:
            return self.writable(self._reserved[key])
        with self._lock:
            if key not in self._second:
                self._reserve([chunk], key[1], self._second)
        return self.writable(self._second[key])

    def reserve_twice(self) -> Callable[[], None]:
        """Reserve a second place for each chunk on its path.

        Returns: what gives them back, as long as nothing was written after this call.
        Raises: StorageError if a path has too little space.
        """
        with self._lock:
            known, before, self._twice = dict(self._second), self._twice, True
            files = set(self._origin)

            def take_back() -> None:
                self._second, self._twice = known, before
                self._take_back(files)

            try:
                for path in range(len(self._homes)):
                    self._reserve(self._lacking(self.paths, path, self._second), path, self._second)
            except BaseException:
                take_back()
                raise

        def give_back() -> None:
            with self._lock:
                take_back()

        return give_back

    def hold(self, file: StoredFile) -> None:
        """Let a file stay although no chunk may lie in it, until `let_go`."""
        with self._lock:
            self._count[file] += 1

    def let_go(self, file: StoredFile) -> None:
        """Let a file go that was held."""
        with self._lock:
            self._count[file] -= 1
            unused = self._unused([file])
        _remove(unused)

    def writable(self, place: Place) -> Place:
        """Return where a chunk at a place is written to if it stays on its path.

        Raises: StorageError if the path has too little space for another file.
        """
        with self._lock:
            return Place(self._instead_of(place.file), place.offset) if place.file in self._kept else place

    def move(self, chunk: int, place: Place) -> None:
        """Note that a chunk was written to a place."""
        with self._lock:
            before, self._now[chunk] = self._now[chunk].file, place
            self._count[place.file] += 1
            self._count[before] -= 1
            unused = self._unused([before])
        _remove(unused)

    # -- files that are kept ------------------------------------------------------------------------------------------

    def is_kept(self, chunk: int) -> bool:
        """Return whether a chunk lies in a file that is never written again."""
        return self._now[chunk].file in self._kept

    def keeps(self, file: StoredFile) -> bool:
        """Return whether a file is never written again."""
        return file in self._kept

    def keep(self, files: Sequence[StoredFile]) -> None:
        """Let files never be written again."""
        with self._lock:
            self._kept.update(files)
            self._next = {origin: file for origin, file in self._next.items() if file not in self._kept}

    def make_room(self) -> None:
        """Reserve now the files that will be written instead of those that are kept.

        Raises: StorageError if a path has too little space.
        """
        if not self._kept:
            return
        with self._lock:
            kept = tuple(self._kept)
            for file in kept:
                self._instead_of(file)
            unused = self._unused(kept)
        _remove(unused)

    def _instead_of(self, file: StoredFile) -> StoredFile:
        """Return the file that is written instead of a kept one, with the same chunks at the same offsets."""
        origin = self._origin[file]
        if origin not in self._next:
            new = self._next[origin] = file.another()
            self._origin[new] = origin
            for places in (self._reserved, self._second):
                for key, place in places.items():
                    if place.file in self._kept and self._origin[place.file] == origin:
                        places[key] = Place(new, place.offset)
        return self._next[origin]

    def _unused(self, files: Sequence[StoredFile]) -> list[StoredFile]:
        """Forget the kept files among some in which no chunk lies and for which none is reserved; return them."""
        reserved = {place.file for places in (self._reserved, self._second) for place in places.values()}
        found = [file for file in files if file in self._kept and not self._count[file] and file not in reserved]
        for file in found:
            self._kept.discard(file)
            del self._origin[file], self._count[file]
        return found

    # -- moves --------------------------------------------------------------------------------------------------------

    def lacking_bytes(self, paths: Sequence[int], path: int) -> int:
        """Return the bytes that are not reserved yet on a path if the chunks are to lie on these paths."""
        lacking = self._lacking(paths, path, self._reserved)
        lacking += self._lacking(paths, path, self._second) if self._twice else []
        return sum(round_up(self.sizes[chunk]) for chunk in lacking)

    def bytes_on(self, paths: Sequence[int] | None, path: int) -> int:
        """Return the bytes on a path if the chunks lie on these paths; None for where they lie or move to now."""
        where = self.paths if paths is None else paths
        return sum(round_up(size) for size, own in zip(self.sizes, where) if own == path)

    def send(self, paths: Sequence[int]) -> None:
        """Let chunks move to other paths.

        Raises: StorageError if a path has too little space; then they lie and move as before.
        """
        with self._lock:
            reserved, second, files = dict(self._reserved), dict(self._second), set(self._origin)
            try:
                for path in range(len(self._homes)):
                    for places in (self._reserved, self._second) if self._twice else (self._reserved,):
                        self._reserve(self._lacking(paths, path, places), path, places)
            except BaseException:
                self._reserved, self._second = reserved, second
                self._take_back(files)
                raise
            self.paths = tuple(paths)

    def _take_back(self, files: Collection[StoredFile]) -> None:
        """Remove all files but these."""
        new = [file for file in self._origin if file not in files]
        for file in new:
            del self._origin[file]
        _remove(new)

    @property
    def reserved_bytes(self) -> Mapping[int, int]:
        """Return the bytes that are reserved on each path, by its number."""
        found = dict.fromkeys(range(len(self._homes)), 0)
        for chunk, path in (*self._reserved, *self._second):
            found[path] += round_up(self.sizes[chunk])
        return found

    @property
    def second_bytes(self) -> Mapping[int, int]:
        """Return the bytes of second places on each path, by its number."""
        found = dict.fromkeys(range(len(self._homes)), 0)
        for chunk, path in tuple(self._second):
            found[path] += self.sizes[chunk]
        return found

    def give_back(self) -> None:
        """Remove all files; nobody may use them any more."""
        _remove(list(self._origin))

    def _lacking(self, paths: Sequence[int], path: int, places: Collection[tuple[int, int]]) -> list[int]:
        return [chunk for chunk, own in enumerate(paths) if own == path and (chunk, path) not in places]

    def _reserve(self, chunks: Sequence[int], path: int, places: dict[tuple[int, int], Place]) -> None:
        """Reserve places for chunks in one file, in their order. Raises: StorageError if there is too little space."""
        if not chunks:
            return
        folder, queue = self._homes[path]
        n_bytes = sum(round_up(self.sizes[chunk]) for chunk in chunks)
        file = StoredFile(folder.reserve(n_bytes), queue, folder, n_bytes)
        self._origin[file], self._origins = self._origins, self._origins + 1
        offset = 0
        for chunk in chunks:
            places[chunk, path] = Place(file, offset)
            offset += round_up(self.sizes[chunk])


def _remove(files: Sequence[StoredFile]) -> None:
    for file in files:
        file.remove()
