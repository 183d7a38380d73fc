"""Which pages of a mapping have become memory of the process, since somebody wrote to them."""

from __future__ import annotations

import mmap
import os

import torch

_PAGEMAP = "/proc/self/pagemap"
_ENTRY_BYTES = 8
# Bits of an entry, as the kernel's documentation of pagemap numbers them.
_PRESENT, _SWAPPED, _OF_FILE = -(1 << 63), 1 << 62, 1 << 61


def has_own_pages(address: int, n_bytes: int) -> bool | None:
    """Return whether any page from an aligned address on is the process's own; None if the system does not say.

    A page of a private mapping of a file is the file's until somebody writes to it.
    """
    wanted = n_bytes // mmap.PAGESIZE * _ENTRY_BYTES
    try:
        handle = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.pread(handle, wanted, address // mmap.PAGESIZE * _ENTRY_BYTES)
        finally:
            os.close(handle)
    except OSError:
        return None
    if len(content) != wanted:
        return None
    entries = torch.frombuffer(bytearray(content), dtype=torch.int64)
    there = (entries & (_PRESENT | _SWAPPED)) != 0
    return bool((there & ((entries & _OF_FILE) == 0)).any())
