"""Freed memory that the C library keeps for itself."""

from __future__ import annotations

import ctypes
import os


def return_freed() -> None:
    """Give memory that was freed back to the system, where the C library keeps it.

    glibc takes tensors of up to 32 MiB from its heap and keeps them when they are freed: after a plan has moved the
    parameters elsewhere, the process would still hold all their bytes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
