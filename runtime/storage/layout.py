"""Tensors laid out over the paths of an engine, and chunks that move when the paths' proportions change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import StorageError
from .chunks import Chunks
from .homes import Home
from .spread import Spread
from .stored import Stored
from .striping import Striping

log = logging.getLogger("offmate")

_KEPT_FREE = 0.02  # of a disk's free bytes, which moves do not take
_MOST_MAPPED = 0.8  # of what the system lets a process map, since a chunk that moves is mapped by itself
_MAPPINGS = Path("/proc/sys/vm/max_map_count")


class Layout:
    """Lays tensors out, so that each path gets bytes in given proportions.

    State: `_counted`, by spread in use, the striping that counts it and the proportions that it was dealt out with;
    `_striping`, the newest one. The caller holds a lock.

    Parameters
    ----------
    homes: the paths. in_use: whether this process still stores in them, so that a tensor's files may be removed.
    """

    def __init__(self, homes: Sequence[Home], in_use: Callable[[], bool]) -> None:
        self._homes, self._in_use = homes, in_use
        self._striping = Striping(len(homes))
        self._counted: dict[Spread, tuple[Striping, Sequence[float] | None]] = {}

    def stored(self, name: str, chunks: Chunks, proportions: Sequence[float] | None) -> Stored:
        """Reserve a tensor's space on the paths, and return it.

        Raises: StorageError if a path has too little space; nothing is reserved then.
        """
        sizes, counted, in_use = chunks.sizes, self._counted, self._in_use
        dealt = self._striping.deal(sizes, proportions)
        try:
            spread = Spread(sizes, self._homes, dealt)
        except BaseException:
            self._striping.take_back(sizes, dealt, proportions)
            raise
        counted[spread] = self._striping, proportions

        def give_back() -> None:
            if in_use():
                striping, last = counted.pop(spread)
                striping.take_back(sizes, spread.paths, last)
                spread.give_back()

        return Stored(name, chunks, spread, give_back)

    def move(self, tensors: Sequence[Stored], proportions: Sequence[float], sets: int = 0) -> int:
        """Let chunks of tensors move at their next write, so that the paths get bytes in other proportions.

        Every path keeps a chunk, so that its rate goes on being measured. A move for which a path has no space is left
        out, and so are all if the system may not map as many pieces as there are chunks.

        Parameters
        ----------
        sets: how many times more the tensors will lie on the paths, since checkpoints keep them.

        Returns: the bytes that move.
        """
        if sum(len(stored.places) for stored in tensors) > _MOST_MAPPED * _most_mappings():
            return 0
        striping, room_bytes, moving_bytes = Striping(len(self._homes)), self._room_bytes(), 0
        kept = _largest(tensors, len(self._homes))
        for stored in tensors:
            spread = stored.places
            chunks = {chunk for one, chunk in kept if one is stored}
            dealt = striping.deal(spread.sizes, proportions, spread.paths, chunks)
            lacking = [
                spread.lacking_bytes(dealt, path)
                + sets * max(0, spread.bytes_on(dealt, path) - spread.bytes_on(None, path))
                for path in range(len(self._homes))
            ]
            before = spread.paths
            if not _sent(spread, dealt, all(need <= room for need, room in zip(lacking, room_bytes))):
                striping.take_back(spread.sizes, dealt, proportions)
                striping.count(spread.sizes, before, proportions)
            else:
                room_bytes = [room - need for need, room in zip(lacking, room_bytes)]
            moving_bytes += sum(size for size, old, new in zip(spread.sizes, before, spread.paths) if old != new)
            self._counted[spread] = striping, proportions
        self._striping = striping
        return moving_bytes

    def _room_bytes(self) -> list[int]:
        return [int((1 - _KEPT_FREE) * home.folder.free_bytes) for home in self._homes]


def bytes_by_path(tensors: Sequence[Stored], n_paths: int) -> list[int]:
    """Return how many bytes of tensors lie on each path or move there."""
    found = [0] * n_paths
    for stored in tensors:
        for size, path in zip(stored.places.sizes, stored.places.paths):
            found[path] += size
    return found


def second_bytes_by_path(tensors: Sequence[Stored], n_paths: int) -> list[int]:
    """Return how many bytes the second places of tensors have on each path."""
    by_path = [stored.places.second_bytes for stored in tensors]
    return [sum(found[path] for found in by_path) for path in range(n_paths)]


def _most_mappings() -> int:
    try:
        return int(_MAPPINGS.read_text())
    except (OSError, ValueError):
        return 1 << 16


def _largest(tensors: Sequence[Stored], n_paths: int) -> list[tuple[Stored, int]]:
    """Return the largest chunk of each path, with its tensor; a large one measures the path's rate best."""
    found: dict[int, tuple[int, Stored, int]] = {}
    for stored in tensors:
        for chunk, (size, path) in enumerate(zip(stored.places.sizes, stored.places.paths)):
            if path not in found or size > found[path][0]:
                found[path] = size, stored, chunk
    return [(stored, chunk) for _, stored, chunk in found.values()]


def _sent(spread: Spread, paths: Sequence[int], has_room: bool) -> bool:
    """Let chunks move if there is room; return whether they do."""
    if not has_room:
        return False
    try:
        spread.send(paths)
    except StorageError as error:  # who reserves sees what another program has just taken
        log.info("stored bytes stay where they are: %s", error)
        return False
    return True
