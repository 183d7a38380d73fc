"""What the stand-in was asked for, and how it behaves."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

LIBRARY = "libstandin.so"


def is_here() -> bool:
    """Whether this process runs over the stand-in."""
    return LIBRARY in os.environ.get("LD_PRELOAD", "")


@cache
def _library() -> ctypes.CDLL:
    path = next(path for path in os.environ["LD_PRELOAD"].split(":") if path.endswith(LIBRARY))
    library = ctypes.CDLL(path)
    library.standin_count_names.restype = ctypes.c_char_p
    library.standin_syncs_of.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.standin_syncs_of.restype = ctypes.c_int64
    library.standin_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
    return library


@dataclass(frozen=True)
class Counts:
    """Calls of a card: kernels, matrix products, copies and fills that were put into its streams, waits for and records
    of events there, times that the host waited, and allocations. offmate's workers are there to wait, so that they are
    left out of `syncs`. `pageable_copies` are those between the card and memory of the host that is not pinned.

    `poisoned_reads` counts work that read memory whose copy or product was not done; see `behaving(deferred=1)`.
    """

    launches: int
    products: int
    copies_in: int
    copies_out: int
    copies_on_device: int
    fills: int
    waits: int
    records: int
    syncs: int
    allocations: int
    frees: int
    host_allocations: int
    bytes_in: int
    bytes_out: int
    pageable_copies: int
    poisoned_reads: int

    def since(self, earlier: Counts) -> Counts:
        """Return what was asked for between two moments."""
        return Counts(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


def counts(index: int = 0) -> Counts:
    """Return what a card has been asked for in this process."""
    library = _library()
    names = library.standin_count_names().decode().split()
    values = (ctypes.c_int64 * len(names))()
    library.standin_counts(index, values)
    found = dict(zip(names, values))
    workers = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("offmate-")]
    found["syncs"] -= sum(library.standin_syncs_of(index, worker) for worker in workers)
    return Counts(**found)


_DEFAULTS = {"link_bytes_per_s": 25e9, "kernel_s": 0.0, "pin_limit_bytes": 1e18, "deferred": 0.0}


@contextlib.contextmanager
def behaving(**settings: float) -> Iterator[None]:
    """Let the stand-in behave otherwise within a block.

    Parameters
    ----------
    link_bytes_per_s: of copies in and of copies out. kernel_s: seconds of a kernel, and of a matrix product.
    pin_limit_bytes: the most memory that can be pinned. deferred: 1 if copies and matrix products happen at their time
        in their stream, and what they are going to write is poison until then; 0 if they happen at once.
    """
    try:
        for name, value in settings.items():
            _set(name, value)
        yield
    finally:
        for name in settings:
            _set(name, _DEFAULTS[name])


def _set(name: str, value: float) -> None:
    if _library().standin_set(name.encode(), value):
        raise ValueError(f"the stand-in has no setting {name!r}; it has {', '.join(_DEFAULTS)}")
