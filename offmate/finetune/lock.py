"""The output folder of a run: whether it is free, and a lock that allows one run at a time in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import OffmateError
from ..files import reason

_NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder during the body; the system releases the lock however the process ends.

    Raises: OffmateError naming the process that holds the lock, or why the lock cannot be taken.
    """
    path = folder / _NAME
    try:
        # A link that somebody has put there is not followed, since the file is written into.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise OffmateError(
            f"{path} cannot be opened: {reason(error)}; a run writes into {folder}, which must be a folder that you "
            "may write to"
        ) from None
    with os.fdopen(handle, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
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


def is_free(output: Path) -> bool:
    """Return whether a run may begin in a folder: it is new or empty, or a run was killed there before it began."""
    if not output.is_dir():
        return not os.path.lexists(output)
    return all(entry.name == _NAME or entry.name.endswith(".tmp") for entry in output.iterdir())


@contextlib.contextmanager
def place_for(output: Path, keep: bool, dry_run: bool) -> Iterator[tuple[Path, list[bool]]]:
    """Yield a folder to work in and a list to fill when training begins; an earlier failure leaves no files behind."""
    if dry_run:
        near = next(parent for parent in output.absolute().parents if parent.is_dir())
        try:
            aside = tempfile.TemporaryDirectory(prefix=".offmate-", dir=near)
        except OSError as error:
            raise OffmateError(f"output {str(output)!r} cannot be made in {near}: {reason(error)}") from None
        with aside as folder:
            yield Path(folder), []
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OffmateError(f"output {str(output)!r} cannot be made: {error.strerror}") from None
    begun: list[bool] = []
    with locked(output):
        try:
            yield output, begun
        except BaseException:
            if not keep and not begun:
                shutil.rmtree(output, ignore_errors=True)
            raise
