"""The paths of an engine: their folders with the threads of their disks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import ArgumentValueError, StorageError
from .disk_queue import DiskQueue
from .disks import Disks
from .folders import Folder
from .in_ram import warn_of_ram
from .open_file import failed
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
        warn_of_ram(folder.folder)
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
