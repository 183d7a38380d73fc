"""Rates that a path is held to, so that tests and demonstrations have disks of known speed."""

from __future__ import annotations

import threading
import time

from ...errors import ArgumentValueError


class Throttle:
    """Makes requests take at least as long as on a disk of given rates.

    State: `_free_s`, by direction, when the emulated disk has done all that was asked of it; changed under `_lock`.

    Parameters
    ----------
    read_bytes_per_s, write_bytes_per_s: the rates. shared: whether reads and writes take turns, as on a disk whose
        mixed rate lies between the two; if not, both go on at once.
    """

    def __init__(self, read_bytes_per_s: float, write_bytes_per_s: float, shared: bool = True) -> None:
        if not (read_bytes_per_s > 0 and write_bytes_per_s > 0):
            raise ArgumentValueError(f"rates are positive, and these are {read_bytes_per_s} and {write_bytes_per_s}")
        self._bytes_per_s = {False: read_bytes_per_s, True: write_bytes_per_s}
        self._shared, self._free_s = shared, {False: 0.0, True: 0.0}
        self._lock = threading.Lock()

    def due_s(self, writes: bool, n_bytes: int) -> float:
        """Return the moment, on `time.perf_counter`'s clock, before which a request that begins now may not end."""
        with self._lock:
            clock = False if self._shared else writes
            self._free_s[clock] = max(time.perf_counter(), self._free_s[clock]) + n_bytes / self._bytes_per_s[writes]
            return self._free_s[clock]
