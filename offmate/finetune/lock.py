"""The output folder of a run: whether it is free, and a lock that allows one run at a time in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArgumentValueError, OffmateError
from ..files import reason
from .names import NEW_TOKENS, SETTINGS, SOURCES, TOKENS

_NAME = ".lock"
_PID_BYTES = 20
# What a run that was killed before it kept its settings leaves behind: the draft of a file.
_DRAFT = re.compile(rf"\.({re.escape(SETTINGS)}|{re.escape(SOURCES)})\.[0-9a-f]{{16}}\.tmp")
# The settings go last, so that a removal which is cut off leaves a run that can be resumed.
_BEFORE_TRAINING = (SOURCES, TOKENS, NEW_TOKENS, f".{NEW_TOKENS}.tmp", SETTINGS)


@dataclass
class Place:
    """The folder that a run works in.

    Parameters
    ----------
    begun: whether training has begun, so that everything stays, however the run ends.
    """

    folder: Path
    begun: bool = False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder during the body; the system releases the lock however the process ends.

    Raises: OffmateError naming the process that holds the lock, or why the lock cannot be taken.
    """
    path = folder / _NAME
    with os.fdopen(_taken(path), "r+") as file:
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _taken(path: Path) -> int:
    """Return the handle of a lock's file, which is locked. Raises: as `locked`."""
    while True:
        try:
            # A link that somebody has put there is not followed, since the file is written into.
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise OffmateError(
                f"{path} cannot be opened: {reason(error)}; a run writes into {path.parent}, which must be a folder "
                "that you may write to"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            words = _held(path.parent, os.read(handle, _PID_BYTES))
            os.close(handle)
            raise OffmateError(words) from None
        # The run that made the file may have removed it meanwhile, and then another one may have made a new file.
        if path.exists() and os.path.samestat(os.fstat(handle), path.lstat()):
            return handle
        os.close(handle)


def _held(folder: Path, process: bytes) -> str:
    number = process.decode("ascii", "replace").strip() or "unknown"
    return f"another run (process {number}) is writing into {folder}; wait for it, or name another folder"


def is_free(output: Path) -> bool:
    """Return whether a run may begin in a folder: it is new or empty, or a run was killed there before it began."""
    if not output.is_dir():
        return not os.path.lexists(output)
    return all(_is_lock(entry) or _DRAFT.fullmatch(entry.name) for entry in output.iterdir())


def _is_lock(entry: Path) -> bool:
    """Return whether a file is a run's lock, and not a file of the user's with this name."""
    if entry.name != _NAME:
        return False
    if entry.is_symlink():
        return True  # locking refuses it in words of its own
    if not entry.is_file():
        return False
    with entry.open("rb") as file:
        content = file.read(_PID_BYTES + 1)
    return len(content) <= _PID_BYTES and (not content or content.isdigit())


def check_free(output: Path, own: bool = False) -> None:
    """Raise OffmateError if a run may not begin in a folder: another one is writing there, or it holds files.

    Parameters
    ----------
    own: this process holds the lock.
    """
    if is_free(output):
        return
    process = None if own else _holder(output)
    if process is not None:
        raise OffmateError(_held(output, process))
    hint = "continue it with --resume, or " if (output / SETTINGS).is_file() else ""
    raise ArgumentValueError(f"output {str(output)!r} exists already; {hint}name another folder")


def _holder(folder: Path) -> bytes | None:
    """Return the number of the process that writes into a folder; None if there is none, or if nobody can tell."""
    try:
        handle = os.open(folder / _NAME, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(handle, _PID_BYTES)
    except OSError:
        return None
    finally:
        os.close(handle)
    return None


@contextlib.contextmanager
def place_for(output: Path, keep: bool, dry_run: bool) -> Iterator[Place]:
    """Yield a folder to work in, which no other run writes into.

    If a new run fails before it trains, what it made is removed. Files of others stay, and so does a folder that was
    there before.

    Parameters
    ----------
    keep: the run in the folder is continued, so that nothing is removed. dry_run: work in a folder that is removed.

    Raises: OffmateError if the folder is not free, is in use, or cannot be made.
    """
    if dry_run:
        near = next(parent for parent in output.absolute().parents if parent.is_dir())
        try:
            aside = tempfile.TemporaryDirectory(prefix=".offmate-", dir=near)
        except OSError as error:
            raise OffmateError(f"output {str(output)!r} cannot be made in {near}: {reason(error)}") from None
        with aside as folder:
            yield Place(Path(folder))
        return
    place = Place(output)
    made = _made(output)
    try:
        with locked(output):
            if not keep:
                check_free(output, own=True)  # again, since a run may have ended here before the lock was taken
            try:
                yield place
            except BaseException:
                if not keep and not place.begun:
                    _remove_own(output)
                raise
    except BaseException:
        if not place.begun:
            for new in made:
                with contextlib.suppress(OSError):  # it is no longer empty
                    new.rmdir()
        raise


def _made(folder: Path) -> list[Path]:
    """Make a folder and those above it, and return the new ones, the innermost first."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OffmateError(f"output {str(folder)!r} cannot be made: {reason(error)}") from None
    return new


def _remove_own(output: Path) -> None:
    """Remove what a run writes before it trains; nothing of these names was there when it began."""
    for name in _BEFORE_TRAINING:
        path = output / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
