"""Atomic file writes, and a cache folder that may fail without consequences."""

from __future__ import annotations

import logging
import os
import reprlib
import secrets
from pathlib import Path

from .errors import ArgumentTypeError, OffmateError

log = logging.getLogger("offmate")

_complained_of: set[Path] = set()  # cache folders


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that a user gives. Raises: ArgumentTypeError if it is none."""
    try:
        return Path(path)
    except TypeError:
        raise ArgumentTypeError(
            f"{reprlib.repr(path)} is a {type(path).__name__}, not the path of a file; give text or a pathlib.Path"
        ) from None


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write text to a file atomically, so that it holds the old content or the new; create missing folders.

    Raises: OffmateError if it cannot be written; no draft is left behind.
    """
    path = as_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_beside(path)
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        raise OffmateError(
            f"{path} cannot be written: {reason(error)}; choose another place, or free space there"
        ) from error


def draft_beside(path: Path) -> Path:
    """Create an empty file beside a path that is new for certain, so that no link planted there is followed."""
    draft = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    return draft


def reason(error: Exception) -> str:
    """Return the system's words for an error of a file, without the path, which the caller names."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def keep(path: Path, text: str) -> None:
    """Write text to a cache; if that fails, warn once for each folder and go on without."""
    try:
        write_whole(path, text)
    except OffmateError as error:
        if path.parent not in _complained_of:
            _complained_of.add(path.parent)
            log.warning("nothing is cached (%s); set Config(cache_dir=...) or OFFMATE_CACHE_DIR", error)


def kept(path: Path) -> str | None:
    """Read a file of a cache; None if there is none, or if it cannot be read, of which a warning tells."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        log.warning("a cached file is ignored (%s: %s)", path, reason(error))
        return None
