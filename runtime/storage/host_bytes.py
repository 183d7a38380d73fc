"""Memory of the host that the system can transfer past its page cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

from ...errors import ArgumentTypeError

ALIGNMENT_BYTES = 4096
"""What offsets, lengths and addresses are multiples of: the sectors of all disks, and the pages of the system."""

_HUGE_PAGE_BYTES = 1 << 21
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, which the module mmap does not name

View = ctypes.Array[ctypes.c_char]


def round_down(n_bytes: int) -> int:
    """Return the last aligned offset that is not after another one."""
    return n_bytes - n_bytes % ALIGNMENT_BYTES


def round_up(n_bytes: int) -> int:
    """Return the first aligned offset that is not before another one."""
    return round_down(n_bytes + ALIGNMENT_BYTES - 1)


def view(address: int, n_bytes: int) -> View:
    """Return memory as a buffer. It keeps nothing alive: who uses it holds what owns the memory."""
    return (ctypes.c_char * n_bytes).from_address(address)


def copy(target: int, source: int, n_bytes: int) -> None:
    """Copy bytes between two addresses, without Python's lock and on this thread alone."""
    ctypes.memmove(target, source, n_bytes)


def check_bytes(tensor: torch.Tensor) -> None:
    """Raise ArgumentTypeError unless a tensor is one piece of the host's memory, as bytes."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ArgumentTypeError(
            f"a transfer needs a contiguous tensor of one dimension and of torch.uint8 on the CPU, and this one is "
            f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}; use tensor.view(torch.uint8).flatten()"
        )


class AlignedBytes:
    """Memory that begins at an aligned address, in huge pages where it is large and the system has them.

    A transfer past the page cache looks up each page of its memory: huge pages save more than half of the cores' time
    that the system's calls take. Only whole huge pages are asked for, so that they take no more RAM than small ones.
    A forked process finds zeros here. If it shared the pages, then bytes that arrive while it is forked could be lost,
    as open(2) says of private memory.

    Parameters
    ----------
    n_bytes: its size.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        n_huge_bytes = n_bytes - n_bytes % _HUGE_PAGE_BYTES
        spare = _HUGE_PAGE_BYTES if n_huge_bytes else 0  # addresses alone, which are never used
        self._memory = mmap.mmap(-1, max(1, n_bytes + spare), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._start = -begin % _HUGE_PAGE_BYTES if spare else 0
        self.address = begin + self._start
        self._advise(_WIPE_ON_FORK, 0, len(self._memory))
        if n_huge_bytes:
            self._advise(mmap.MADV_HUGEPAGE, self._start, n_huge_bytes)

    def _advise(self, advice: int, start: int, n_bytes: int) -> None:
        with contextlib.suppress(OSError):  # a system that does not know it
            self._memory.madvise(advice, start, n_bytes)

    def tensor(self, start: int) -> torch.Tensor:
        """Return the bytes from an offset on as a tensor, which keeps the memory alive."""
        first = self._start + start
        return torch.frombuffer(self._memory, dtype=torch.uint8)[first : self._start + self.n_bytes]

    def view(self, start: int, n_bytes: int) -> View:
        """Return a part of it as a buffer, which this object has to outlive."""
        if start < 0 or start + n_bytes > self.n_bytes:
            raise IndexError(f"{n_bytes} bytes from {start} are not within {self.n_bytes}")
        return view(self.address + start, n_bytes)

    def fill(self, content: bytes) -> None:
        """Set the first bytes."""
        self._memory[self._start : self._start + len(content)] = content


def empty_aligned(n_bytes: int, offset: int = 0) -> torch.Tensor:
    """Return a host tensor of bytes into which the engine reads without a second copy.

    Parameters
    ----------
    n_bytes: its length.
    offset: where in a file its first byte comes from; memory and file then lie alike within a page.
    """
    first = offset % ALIGNMENT_BYTES
    return AlignedBytes(first + n_bytes).tensor(first)
