"""The files of a stored tensor, mapped to one stretch of addresses."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from ...errors import StorageError
from .addresses import Addresses, reserved
from .checksums import checksum
from .host_bytes import ALIGNMENT_BYTES, round_up
from .open_file import OpenFile, failed
from .own_pages import has_own_pages
from .spread import Place
from .stored import Stored
from .stored_file import StoredFile


class _Run(NamedTuple):
    """Neighbouring bytes of a tensor that are neighbours in one file too: from which byte on, and how many."""

    offset: int
    first: int
    n_bytes: int


class Showing:
    """The memory that shows a stored tensor. Once nobody has it any more, nothing is mapped there.

    Parameters
    ----------
    first: the address of the tensor's first byte. memory: the object that keeps the addresses.
    """

    def __init__(self, stored: Stored, first: int, memory: weakref.ReferenceType[object]) -> None:
        self._stored, self._first, self.memory = weakref.proxy(stored), first, memory

    def address(self, first: int) -> int:
        """Return where a byte is."""
        return self._first + first

    def show(self, place: Place, first: int, n_bytes: int, file: OpenFile, *, follows: bool = True) -> None:
        """Show bytes from their new place; the file `follows` what is written to the memory.

        Raises: StorageError if the system refuses.
        """
        memory = self.memory()  # as long as this holds it, nobody else gets the addresses
        if memory is not None:
            file.map(self._first + first, n_bytes, place.offset, shared=follows)

    def was_edited(self, first: int, n_bytes: int, expected: int) -> bool:
        """Return whether bytes that are kept in a file, and have a checksum there, were written to in memory."""
        memory = self.memory()
        if memory is None:
            return False
        found = has_own_pages(self._first + first, n_bytes)
        return checksum(self._first + first, n_bytes) != expected if found is None else found

    def part_from(self, files: Sequence[StoredFile]) -> None:
        """Let no more that is written to the memory go to these files. Raises: StorageError if the system refuses."""
        memory = self.memory()
        if memory is None:
            return
        runs = {file: own for file, own in _runs(self._stored).items() if file in files}
        with contextlib.ExitStack() as stack:
            opened = {}
            for file in runs:
                opened[file] = file.open()
                stack.callback(opened[file].close)
            try:
                for file, own in runs.items():
                    _map_runs(opened[file], own, self._first, shared=False)
            except BaseException:
                self._follow_again(opened, runs)
                raise

    def _follow_again(self, opened: dict[StoredFile, OpenFile], runs: dict[StoredFile, list[_Run]]) -> None:
        """Let what is written to the memory go to files again that nothing keeps; else let nobody read them."""
        for chunk, place in enumerate(self._stored.places):
            if place.file not in runs or self._stored.places.is_kept(chunk):
                continue
            first, last = self._stored.chunks.range_of(chunk)
            try:
                opened[place.file].map(self._first + first, round_up(last - first), place.offset)
            except StorageError:
                self._stored.lose(chunk)


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
        _map_runs(opened, runs, address)
    finally:
        opened.close()  # a mapping needs no handle


def _map_runs(opened: OpenFile, runs: list[_Run], address: int, shared: bool = True) -> None:
    for run in runs:
        opened.map(address + run.first, run.n_bytes, run.offset, shared)


def _runs(stored: Stored) -> dict[StoredFile, list[_Run]]:
    """Return by file what can be mapped by one call each; the system allows a process only so many mappings."""
    runs: dict[StoredFile, list[_Run]] = {}
    for chunk, (file, offset) in enumerate(stored.places):
        first, last = stored.chunks.range_of(chunk)
        own, n_bytes = runs.setdefault(file, []), round_up(last - first)
        if own and (own[-1].first + own[-1].n_bytes, own[-1].offset + own[-1].n_bytes) == (first, offset):
            own[-1] = own[-1]._replace(n_bytes=own[-1].n_bytes + n_bytes)
        else:
            own.append(_Run(offset, first, n_bytes))
    return runs
