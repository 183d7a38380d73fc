"""The files of stored tensors, and those that a transfer has open."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import StorageError
from .folders import Folder
from .open_file import OpenFile
from .transfers import Queue

log = logging.getLogger("offmate")


@dataclass(frozen=True, eq=False)
class StoredFile:
    """A tensor's bytes on one path.

    Parameters
    ----------
    path: of the file. queue: the threads of its disk. folder: that it lies in. n_bytes: its length.
    """

    path: Path
    queue: Queue
    folder: Folder
    n_bytes: int

    def open(self) -> OpenFile:
        """Open it. Raises: StorageError if it has gone."""
        return self.folder.open(self.path)

    def another(self) -> StoredFile:
        """Reserve another file of this length in the folder. Raises: StorageError if there is too little space."""
        return replace(self, path=self.folder.reserve(self.n_bytes))

    def remove(self) -> None:
        """Remove it, or say that it stays."""
        try:
            self.folder.remove(self.path)
        except StorageError as error:  # nobody waits for it who could be told
            log.warning("space that is no longer used stays taken until training ends: %s", error)


class OpenFiles:
    """The files of one disk that a transfer has open.

    State: `_open`, changed under `_lock`.
    """

    def __init__(self) -> None:
        self._open: dict[StoredFile, OpenFile] = {}
        self._lock = threading.Lock()

    def of(self, file: StoredFile) -> OpenFile:
        """Return a file, open. Raises: StorageError if it cannot be opened."""
        with self._lock:
            if file not in self._open:
                self._open[file] = file.open()
            return self._open[file]

    def close(self) -> None:
        """Close all. Raises: StorageError if the system cannot keep what was written."""
        failures = []
        for file in self._open.values():
            try:
                file.close()
            except StorageError as error:
                failures.append(error)
        if failures:
            raise failures[0]
