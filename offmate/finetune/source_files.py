"""The files of a source of data: which of a folder are read, and which are not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArgumentValueError, OffmateError

TEXT = (".txt", ".md", ".text")
JSON = (".jsonl", ".ndjson", ".json")
CSV, PARQUET = ".csv", ".parquet"
_READ = (*TEXT, *JSON, CSV, PARQUET)
_KINDS = ", ".join(_READ)
# Files about a folder, by the first word of their names.
_ABOUT = ("readme", "license", "licence", "copying", "notice")
_SHOWN_FILES = 5


@dataclass(frozen=True)
class Files:
    """What of a source is read, sorted by name, and what is not, each with the reason."""

    read: list[Path]
    skipped: list[tuple[Path, str]]


def source_files(data: str) -> Files:
    """Find the files of a source: the file itself, or a folder's files of known kinds.

    Raises: OffmateError if there are no such files, if the file is of another kind, or if a folder or a link in it
        cannot be read.
    """
    path = Path(data)
    if not path.exists():
        raise ArgumentValueError(
            f"data {data!r}: no such file; write a data set of the Hub as hf:NAME or hf:NAME:SPLIT"
        )
    if path.is_file():
        if path.suffix.lower() not in _READ:
            raise ArgumentValueError(
                f"data {data!r}: a file whose name ends with {path.suffix!r} is of no known kind. These can be read: "
                f"{_KINDS}; convert the file, or rename it if it is of one of these kinds"
            )
        return Files([path], [])
    found = _of_folder(path)
    if not found.read:
        others = skipped_line(found.skipped)
        raise ArgumentValueError(
            f"data {data!r}: the folder holds no {_KINDS} file that is read{f' ({others})' if others else ''}"
        )
    return found


def skipped_line(skipped: list[tuple[Path, str]]) -> str:
    """Return how many files are not read, and the first of them with the reason; empty if there are none."""
    if not skipped:
        return ""
    shown = ", ".join(f"{path} ({why})" for path, why in skipped[:_SHOWN_FILES])
    more = f" and {len(skipped) - _SHOWN_FILES:,} more" if len(skipped) > _SHOWN_FILES else ""
    return f"{len(skipped):,} of the folder's files and folders not read: {shown}{more}"


def _of_folder(folder: Path) -> Files:
    read, skipped = [], []
    for place, folders, names in os.walk(folder, onerror=_refuse_folder):
        here = Path(place)
        for name in list(folders):
            why = "hidden" if name.startswith(".") else "a link to a folder" if (here / name).is_symlink() else ""
            if why:
                folders.remove(name)
                skipped.append((here / name, why))
        for name in names:
            why = _why_not(here / name)
            if why:
                skipped.append((here / name, why))
            else:
                read.append(here / name)
    return Files(sorted(read), sorted((path.relative_to(folder), why) for path, why in skipped))


def _why_not(file: Path) -> str:
    """Return why a file of a folder is not read; empty if it is."""
    if file.name.startswith("."):
        return "hidden"
    if file.suffix.lower() not in _READ:
        return f"of the kind {file.suffix!r}" if file.suffix else "of no known kind"
    if file.is_symlink() and not file.exists():
        raise OffmateError(f"{file}: a broken link to {os.readlink(file)}; remove it, or bring that file back")
    if not file.is_file():
        return "not a file"
    if file.stem.lower() in _ABOUT:
        return "about the folder"
    return ""


def _refuse_folder(error: OSError) -> None:
    raise OffmateError(f"{error.filename}: cannot be read: {error.strerror}; allow it, or move the folder away")
