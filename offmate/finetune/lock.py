"""A lock that allows one run at a time in an output folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import OffmateError

_NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder during the body; the system releases the lock however the process ends.

    Raises: OffmateError naming the process that holds the lock.
    """
    path = folder / _NAME
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise OffmateError(
                f"another run (process {file.read().strip() or 'unknown'}) is writing into {folder}; wait for it, or "
                "name another folder"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
