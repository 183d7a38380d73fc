"""The disks that an engine works with: the threads of each, made at its first use."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

from .disk_queue import DiskQueue, Limits
from .files import Files
from .host_bytes import ALIGNMENT_BYTES
from .throttle import Throttle

log = logging.getLogger("offmate")


@dataclass
class Disks:
    """The queues of all disks.

    State: `_queues`, by disk or by the throttle that stands for one; `_through_cache`, those that were warned of. Both
    are changed under `_lock`.
    """

    files: Files
    limits: Limits
    _queues: dict[str | Throttle, DiskQueue] = field(default_factory=dict)
    _through_cache: set[str | Throttle] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def queue(self, path: Path, throttle: Throttle | None) -> DiskQueue:
        """Return the threads of the disk that a file or a folder is on. Raises: OSError if there is no such path."""
        key = throttle or self.files.disk(path)
        with self._lock:
            if key not in self._queues:
                self._queues[key] = DiskQueue(str(path), self.limits, throttle)
            return self._queues[key]

    def all(self) -> tuple[DiskQueue, ...]:
        """Return the queues of the disks in use."""
        with self._lock:
            return tuple(self._queues.values())

    def warn_of_cache(self, path: Path, throttle: Throttle | None) -> None:
        """Say once for each disk that the system copies all that is transferred."""
        key = throttle or self.files.disk(path)
        with self._lock:
            known = key in self._through_cache
            self._through_cache.add(key)
        if not known:
            log.warning(
                "the file system of %s has no O_DIRECT for blocks of %d bytes, so that every transfer goes through the "
                "page cache and takes more of the CPU. A folder on a local disk (ext4, xfs, btrfs) is faster",
                path,
                ALIGNMENT_BYTES,
            )
