"""The paths of an engine: their folders with the threads of their disks, and tensors laid out over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import ArgumentValueError, StorageError
from .chunks import Chunks
from .disk_queue import DiskQueue
from .disks import Disks
from .folders import Folder
from .host_bytes import round_up
from .open_file import failed
from .stored import Stored, StoredFile
from .striping import Striping
from .throttle import Throttle


class Home(NamedTuple):
    """A folder and the threads of its disk."""

    folder: Folder
    queue: DiskQueue


def open_homes(
    disks: Disks, paths: Sequence[Path], throttles: Sequence[Throttle | None], opened: list[Folder]
) -> list[Home]:
    """Lock the folders of an engine's paths and start the threads of their disks.

    Parameters
    ----------
    throttles: by path, or none at all. opened: gets each folder once it is locked, so that the caller can close it.

    Raises: ArgumentValueError for paths on one disk, StorageError for a folder that cannot be stored in.
    """
    if throttles and len(throttles) != len(paths):
        raise ArgumentValueError(f"{len(throttles)} throttles do not fit {len(paths)} paths; give one or None for each")
    throttles = throttles or [None] * len(paths)
    _check_apart(disks, paths, throttles)
    homes = []
    for path, throttle in zip(paths, throttles):
        folder = Folder(disks.files, path.resolve(), disks.limits.request_bytes)
        opened.append(folder)
        homes.append(Home(folder, disks.queue(path, throttle)))
        if not folder.direct:
            disks.warn_of_cache(path, throttle)
    return homes


def _check_apart(disks: Disks, paths: Sequence[Path], throttles: Sequence[Throttle | None]) -> None:
    """Raise ArgumentValueError if two paths are one folder or on one disk."""
    folders: dict[tuple[int, int], Path] = {}
    known: dict[str | Throttle, Path] = {}
    for path, throttle in zip(paths, throttles):
        try:
            found, disk = disks.files.stat(path), throttle or disks.files.disk(path)
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(f"{path} is not a folder; make it, or name another one") from None
        except OSError as error:
            raise failed("looking at", path, error) from error
        same = folders.setdefault((found.st_dev, found.st_ino), path)
        if same is not path:
            raise ArgumentValueError(f"{same} and {path} are the same folder; name each one once")
        other = known.setdefault(disk, path)
        if other is not path:
            raise ArgumentValueError(
                f"{other} and {path} are on the same disk, which two paths do not make faster; name one of them"
            )


def laid_out(
    name: str,
    chunks: Chunks,
    homes: Sequence[Home],
    striping: Striping,
    proportions: Sequence[float] | None,
    in_use: Callable[[], bool],
) -> Stored:
    """Reserve a tensor's space on the paths, and return it.

    Parameters
    ----------
    in_use: whether this process still stores in the paths, so that the tensor's files may be removed.

    Raises: StorageError if a path has too little space; nothing is reserved then.
    """
    sizes = chunks.sizes
    dealt = striping.deal(sizes, proportions)
    lengths = [0] * len(homes)
    offsets = []
    for size, path in zip(sizes, dealt):
        offsets.append(lengths[path])
        lengths[path] += round_up(size)
    files: dict[int, StoredFile] = {}
    try:
        for number, (home, length) in enumerate(zip(homes, lengths)):
            if length:
                files[number] = StoredFile(home.folder.reserve(length), home.queue, home.folder, length)
    except BaseException:
        striping.take_back(sizes, dealt, proportions)
        for file in files.values():
            file.folder.remove(file.path)
        raise
    held = set(files.values())

    def give_back() -> None:
        if in_use():
            striping.take_back(sizes, dealt, proportions)
            for file in held:
                file.remove()

    return Stored(name, chunks, [(files[path], offset) for path, offset in zip(dealt, offsets)], held, give_back)
