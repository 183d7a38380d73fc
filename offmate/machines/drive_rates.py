"""Drives of this machine are measured: the rows of a hardware file, and what to say about them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import StorageError
from ..progress import Progress
from ..runtime.storage.engine import Engine
from ..runtime.storage.files import SystemFiles
from ..runtime.storage.folders import StoragePath
from ..runtime.storage.measure import PathRates, SustainedRates, rates, sustained_rates
from ..sizes import format_bytes, format_wear
from .drives import Drive
from .figures import with_source

PROBE_BYTES = 1 << 26
"""Written and read on a path to measure it."""
_SHARE = 2  # one part in so many of what is free is written at most to get past a drive's cache
_MOST_BYTES = 512 << 30  # caches of consumer drives are smaller
_LEAST_BYTES = 1 << 30


@dataclass(frozen=True)
class Measured:
    """A drive that was measured.

    Parameters
    ----------
    sustained: how it was found out what it does past its cache; None if that was not asked for.
    """

    drive: Drive
    sustained: SustainedRates | None = None

    def row(self) -> dict[str, Any]:
        """Return what a hardware file has of it."""
        amount = format_bytes(PROBE_BYTES)
        how = f"{amount} past the page cache, which may be the rate of the drive's own cache"
        if self.sustained is not None:
            how = f"sustained: {self.words}"
        today = date.today().isoformat()
        drive = self.drive
        return {
            "folder": drive.folder,
            "read_bytes_per_s": with_source(drive.read_bytes_per_s, f"reads alone, {how}; measured {today}"),
            "write_bytes_per_s": with_source(drive.write_bytes_per_s, f"writes alone, {how}; measured {today}"),
            "both_bytes_per_s": with_source(
                drive.both_bytes_per_s, f"as many bytes of each at once, {how}; measured {today}"
            ),
            "free_bytes": with_source(drive.free_bytes, f"free when it was measured, {today}"),
        }

    @property
    def words(self) -> str:
        """How the rate of writes went on; empty if only a cache may have been measured."""
        found = self.sustained
        if found is None:
            return ""
        first, last = (f"{format_wear(int(rate))}/s" for rate in (found.first_write_bytes_per_s, self._write))
        amount = format_bytes(found.written_bytes)
        if not found.fell:
            return f"the rate of writes, {last}, did not fall within {amount}"
        if not found.settled:
            return (
                f"writes fell from {first} and did not settle within {amount}; {last} is the mean of the last quarter"
            )
        return f"writes fell from {first} to {last} within {amount} and stayed there"

    @property
    def _write(self) -> float:
        return self.drive.write_bytes_per_s


def check_drives(paths: Sequence[StoragePath], sustained: bool = False) -> None:
    """Look whether all paths can be stored in together, and have room to be measured, past their caches if asked.

    Raises: StorageError for a folder that is missing, in use, too full or cannot be written to, ArgumentValueError for
    two on one disk.
    """
    with Engine(paths):
        pass  # it says what is wrong with them
    for path in paths:
        check_free(path, _SHARE * _LEAST_BYTES if sustained else 2 * PROBE_BYTES)


def most_bytes(path: StoragePath) -> int:
    """Return how many bytes are written at most to find a path's sustained rates.

    Raises: StorageError if too little is free to get past any cache.
    """
    return min(check_free(path, _SHARE * _LEAST_BYTES) // _SHARE, _MOST_BYTES)


def check_free(path: StoragePath, least_bytes: int, otherwise: str = "") -> int:
    """Return the free bytes of a path's disk.

    Parameters
    ----------
    least_bytes: that measuring it takes. otherwise: what else to try, for the message.

    Raises: StorageError if less is free.
    """
    folder = Path(path.folder)
    free = SystemFiles().free_bytes(folder)
    if free < least_bytes:
        raise StorageError(
            f"{format_bytes(free)} are free in {folder}, and measuring it needs {format_bytes(least_bytes)}; free "
            f"space there, or name a folder on a larger disk{otherwise}"
        )
    return free


def measure_drive(path: StoragePath, say: Progress) -> Measured:
    """Measure a path with few bytes, as `offmate.compile` does.

    Raises: StorageError if it cannot be stored in.
    """
    say(f"measuring {os.fspath(path.folder)}", 0.0)
    return Measured(_drive(path, rates(path, PROBE_BYTES)))


def measure_sustained(path: StoragePath, say: Progress, amount_bytes: int) -> Measured:
    """Measure a path past its drive's cache, with at most so many bytes; see `sustained_rates`.

    Raises: StorageError if it cannot be stored in.
    """
    found = sustained_rates(path, amount_bytes, say=partial(say, f"writing to {os.fspath(path.folder)}"))
    return Measured(_drive(path, found.rates), found)


def _drive(path: StoragePath, found: PathRates) -> Drive:
    folder = os.path.abspath(path.folder)
    free = SystemFiles().free_bytes(Path(folder))
    return Drive(folder, found.read_bytes_per_s, found.write_bytes_per_s, found.both_bytes_per_s, free)
