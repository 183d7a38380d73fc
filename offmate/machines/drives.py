"""The drives of a hardware file: folders that optimizer states may lie in, with the rates of their drives."""

from __future__ import annotations

import os
import reprlib
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentValueError
from ..runtime.storage.path_rates import in_turns
from .figures import figure

_RATES = ("read_bytes_per_s", "write_bytes_per_s")
_BOTH = "both_bytes_per_s"
_KEYS = {"folder", *_RATES, _BOTH, "free_bytes"}


@dataclass(frozen=True)
class Drive:
    """A folder of a machine, and what its drive does.

    Parameters
    ----------
    folder: its whole path. read_bytes_per_s, write_bytes_per_s: rates of reads and writes alone. both_bytes_per_s: of
        both together, as many bytes of each; of a disk on which they take turns if the file does not say. free_bytes:
        free when it was measured; 0 if the file does not say.
    """

    folder: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float
    free_bytes: int = 0


def drives_of(data: Any, where: str) -> tuple[Drive, ...]:
    """Return the drives that a hardware file lists.

    Parameters
    ----------
    data: what stands under "storage", if anything. where: the file, for messages.

    Raises: ArgumentValueError for what is not a list of folders with their rates.
    """
    if not isinstance(data, list):
        raise ArgumentValueError(f"{where}: storage must be a list of folders with rates, found {reprlib.repr(data)}")
    drives = tuple(_drive(one, f"{where}: storage[{number}]") for number, one in enumerate(data))
    twice = {one.folder for one in drives if sum(same_folder(one.folder, other.folder) for other in drives) > 1}
    if twice:
        raise ArgumentValueError(f"{where}: storage names {min(twice)} twice; keep the rates that are right")
    return drives


def same_folder(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> bool:
    """Return whether two paths are spelt alike, but for dots, doubled slashes and the one at the end."""
    return os.path.abspath(first) == os.path.abspath(second)


def _drive(data: Any, where: str) -> Drive:
    if not isinstance(data, dict) or not isinstance(data.get("folder"), str) or not os.path.isabs(data["folder"]):
        raise ArgumentValueError(
            f'{where} must name a whole path, such as {{"folder": "/mnt/nvme/offmate", ...}}, found '
            f"{reprlib.repr(data)}"
        )
    unknown = sorted(data.keys() - _KEYS)
    if unknown:
        raise ArgumentValueError(f"{where}: {unknown[0]!r} is not known; known keys: {', '.join(sorted(_KEYS))}")
    read, write = (figure(data, key, where, least=1.0, known=_KEYS) for key in _RATES)
    both = figure(data, _BOTH, where, least=1.0) if _BOTH in data else in_turns(read, write)
    free = figure(data, "free_bytes", where, known=_KEYS) if "free_bytes" in data else 0.0
    return Drive(data["folder"], read, write, both, int(free))
