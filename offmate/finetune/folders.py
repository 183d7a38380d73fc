"""Folders that are written aside, get digests of their files, and then their name, so that each of them is complete."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from safetensors import SafetensorError

from ..errors import OffmateError
from ..files import reason

log = logging.getLogger("offmate")

MANIFEST = "manifest.json"
MISSING = "is missing"
ENTRY_FILES = ("config.json", "adapter_config.json")  # they make a result loadable, and appear last


def write_aside(target: Path, write: Callable[[Path], None], what: str) -> None:
    """Write a folder aside, with the digests of its files, and give it its name once it is complete.

    Raises: OffmateError, which names `what`, if it cannot be written.
    """
    aside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write(aside)
        write_manifest(aside)
        if target.exists():
            remove(target)
        os.replace(aside, target)
        sync_folder(target.parent)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OffmateError) and not isinstance(error.__cause__, OSError):
            raise
        raise OffmateError(
            f"{what} could not be written below {target.parent}: {error}. Earlier checkpoints are untouched; free disk "
            "space and continue with --resume"
        ) from error


def write_manifest(folder: Path) -> None:
    """Write the size and the digest of each file of a folder into it, once they are on disk."""
    files = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
        files[file.name] = [file.stat().st_size, _digest(file)]
    with (folder / MANIFEST).open("w") as manifest:
        json.dump(files, manifest)
        manifest.flush()
        os.fsync(manifest.fileno())
    sync_folder(folder)


def move_in(aside: Path, target: Path) -> None:
    """Move the files of a folder that is complete into another one, those that make it loadable last.

    A file that is there with another content is not lost: it keeps its name with ".before-1" or such behind it.
    """
    for file in sorted(aside.iterdir(), key=lambda file: file.name in ENTRY_FILES):
        if file.name == MANIFEST:
            continue
        there = target / file.name
        if os.path.lexists(there) and not (there.is_file() and _digest(there) == _digest(file)):
            os.replace(there, _unused(there))
        os.replace(file, there)
    sync_folder(target)
    shutil.rmtree(aside)


def _unused(path: Path) -> Path:
    """Return a name for a file that has to make room, and say so."""
    names = (path.with_name(f"{path.name}.before-{number}") for number in count(1))
    free = next(name for name in names if not os.path.lexists(name))
    log.warning("%s is not the run's, so it is kept as %s", path, free.name)
    return free


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Return the size and the digest of each file that was written into a folder. Raises: ValueError without them."""
    try:
        files = json.loads((path / MANIFEST).read_text())
        return {str(name): (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def faults(path: Path, files: dict[str, tuple[int, str]]) -> Iterator[tuple[str, str]]:
    """Yield each file of a folder that is not as it was written, and what is wrong with it."""
    for name, (size, digest) in files.items():
        try:
            if (path / name).stat().st_size != size or _digest(path / name) != digest:
                yield name, "has changed"
        except FileNotFoundError:
            yield name, MISSING
        except OSError as error:
            yield name, f"cannot be read: {reason(error)}"


def remove(path: Path) -> None:
    """Remove a folder; it is renamed first, so that a partly removed folder has no checkpoint's name."""
    aside = path.with_name(f".{path.name}.old.tmp")
    os.replace(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
