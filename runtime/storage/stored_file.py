"""A file that the engine keeps a tensor's bytes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .open_file import OpenFile
from .transfers import Queue


@dataclass(frozen=True, eq=False)
class StoredFile:
    """Some of a tensor's bytes on one path.

    Parameters
    ----------
    path: of the file. queue: the threads of its disk. open: opens it.
    """

    path: Path
    queue: Queue
    open: Callable[[], OpenFile]
