"""Stretches of addresses of the process that files can be mapped to."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import NamedTuple

_FIXED = 0x10  # MAP_FIXED, which Python does not name
_NO_RESERVE = 0x4000  # MAP_NORESERVE
_NO_ACCESS = 0  # PROT_NONE
_FAILED = ctypes.c_void_p(-1).value

_system = ctypes.CDLL(None, use_errno=True)
_system.mmap.restype = ctypes.c_void_p
_system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Addresses(NamedTuple):
    """Neighbouring addresses.

    Parameters
    ----------
    first: a multiple of the page size. n_bytes: how many there are, whole pages.
    """

    first: int
    n_bytes: int

    def give_back(self) -> None:
        """Give them back; they must not be used any more, since the system may give them to others at once.

        Raises: OSError if the system refuses.
        """
        if _system.munmap(self.first, self.n_bytes) != 0:
            raise _last_error()


def reserved(n_bytes: int) -> Addresses:
    """Return addresses that nobody else gets and that hold no memory. Raises: OSError if the system refuses."""
    first = _system.mmap(None, n_bytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if first == _FAILED:
        raise _last_error()
    return Addresses(first, n_bytes)


def put_file(handle: int, address: int, n_bytes: int, offset: int, shared: bool = True) -> None:
    """Let reserved addresses be the bytes of a file from an offset.

    Parameters
    ----------
    shared: whether what is written to the addresses goes to the file. If not, pages that are written to become memory
        of the process, and no room for them is counted beforehand.

    Raises: OSError if the system refuses.
    """
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _NO_RESERVE
    if _system.mmap(address, n_bytes, access, kind | _FIXED, handle, offset) == _FAILED:
        raise _last_error()


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
