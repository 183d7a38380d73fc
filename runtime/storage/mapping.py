"""The files of a stored tensor, mapped to one stretch of addresses."""

from __future__ import annotations

import mmap
import weakref
from typing import NamedTuple

from ...errors import StorageError
from .addresses import Addresses, reserved
from .host_bytes import ALIGNMENT_BYTES, round_up
from .open_file import OpenFile, failed
from .stored import Stored
from .stored_file import StoredFile


class _Run(NamedTuple):
    """Neighbouring bytes of a tensor that are neighbours in one file too: from which byte on, and how many."""

    offset: int
    first: int
    n_bytes: int


class Showing:
    """Memory that shows a stored tensor, for as long as it lives.

    Parameters
    ----------
    memory: lives as long as the addresses are the tensor's. address: the first one.
    """

    def __init__(self, memory: object, address: int) -> None:
        self._memory, self._address = weakref.ref(memory), address

    def show(self, file: OpenFile, offset: int, first: int, n_bytes: int) -> None:
        memory = self._memory()  # while somebody holds it, nobody else gets the addresses
        if memory is not None:
            file.map(self._address + first, n_bytes, offset)


def mapped(stored: Stored) -> Addresses:
    """Map a stored tensor.

    What is written to the memory is in the files, and what a transfer writes to the files is in the memory, unless both
    happen at the same time. The files may be removed while they are mapped.

    Returns: addresses of all its bytes in order, up to a whole page.
    Raises: StorageError if the system refuses, or has larger pages than the files are laid out for.
    """
    if mmap.PAGESIZE > ALIGNMENT_BYTES:
        raise StorageError(
            f"{stored.name} cannot be mapped from {stored.files[0]}: the pages of this system have {mmap.PAGESIZE} "
            f"bytes, and stored files are cut at multiples of {ALIGNMENT_BYTES}. Keep it in RAM, or use a system with "
            f"pages of {ALIGNMENT_BYTES} bytes"
        )
    try:
        addresses = reserved(round_up(stored.n_bytes))
    except OSError as error:
        raise failed("reserving addresses for", stored.files[0], error) from error
    try:
        for file, runs in _runs(stored).items():
            _map(file, runs, addresses.first)
    except BaseException:
        addresses.give_back()
        raise
    return addresses


def _map(file: StoredFile, runs: list[_Run], address: int) -> None:
    opened = file.open()
    try:
        for run in runs:
            opened.map(address + run.first, run.n_bytes, run.offset)
    finally:
        opened.close()  # a mapping needs no handle


def _runs(stored: Stored) -> dict[StoredFile, list[_Run]]:
    """Return by file what can be mapped by one call each; the system allows a process only so many mappings."""
    runs: dict[StoredFile, list[_Run]] = {}
    for chunk, (file, offset) in enumerate(stored.places):
        first, last = stored.chunks.range_of(chunk)
        own, n_bytes = runs.setdefault(file, []), round_up(last - first)
        if own and own[-1].first + own[-1].n_bytes == first:  # a file has its chunks in the order of the tensor
            own[-1] = own[-1]._replace(n_bytes=own[-1].n_bytes + n_bytes)
        else:
            own.append(_Run(offset, first, n_bytes))
    return runs
