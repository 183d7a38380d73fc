"""Transfers: requests to one or more disks that begin after some events and end with one."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

from ...errors import StorageError
from ..events import Event, LaneEvent
from .host_bytes import AlignedBytes
from .open_file import OpenFile


class Worker(Protocol):
    """A thread's way to a disk: it holds requests to the disk's rate, and counts them."""

    buffer: AlignedBytes
    """Memory for one request, which nobody else uses."""

    def read(self, file: OpenFile, address: int, n_bytes: int, offset: int, least_bytes: int) -> None:
        """Read a request, as `OpenFile.read`."""
        ...

    def write(self, file: OpenFile, address: int, n_bytes: int, offset: int) -> None:
        """Write a request, as `OpenFile.write`."""
        ...


class Opened(Protocol):
    """What requests work on, from the first of them to the last."""

    def close(self) -> None:
        """Close it. Raises: StorageError if the system cannot keep what was written."""
        ...


class Queue(Protocol):
    """Takes the parts of transfers that may begin."""

    def add(self, part: Part, transfer: Transfer) -> None:
        """Have the requests of a part done."""
        ...


class Request(NamedTuple):
    """One piece of a transfer, done by one thread.

    Parameters
    ----------
    key: of two requests with the same key, one begins when the other one has ended. work: does it.
    """

    key: Hashable
    work: Callable[[Worker, Any], None]


class Part:
    """The requests of a transfer to a file, or to files of one disk, open from the first of them to the last.

    State: `requests`, those not begun, changed under the lock of the queue; `_file`, under `_opening`; `_uses`, the
    number of those that have not ended, under `_counting`.

    Parameters
    ----------
    open_file: opens what requests are given. keep_open: leave it open afterwards.
    """

    def __init__(
        self, queue: Queue, requests: list[Request], open_file: Callable[[], Opened], keep_open: bool = False
    ) -> None:
        self.queue, self.requests = queue, deque(requests)
        self._open_file, self._keep_open = open_file, keep_open
        self._file: Opened | None = None
        self._uses = len(requests)
        self._opening, self._counting = threading.Lock(), threading.Lock()  # opening may hang, and counting must not

    def file(self) -> Opened:
        """Return what is open. Raises: StorageError if it cannot be opened."""
        with self._opening:
            if self._file is None:
                self._file = self._open_file()
            return self._file

    def used(self, n_requests: int) -> None:
        """Count requests as ended or dropped, and close the file after the last one.

        One that hangs does not count, so that its handle is not given to another file while the system may use it.

        Raises: StorageError if the system cannot keep at closing what was written.
        """
        with self._counting:
            self._uses -= n_requests
            if self._uses or self._file is None or self._keep_open:
                return
        self._file.close()

    def drop(self, hangs: bool = False) -> None:
        """Forget the requests that have not begun; call it under the lock of the queue.

        Parameters
        ----------
        hangs: the disk does, so that the file stays open, since closing it may hang too.
        """
        n_requests = len(self.requests)
        self.requests.clear()
        if n_requests and not hangs:
            with contextlib.suppress(StorageError):  # its transfer has failed already
                self.used(n_requests)


class Transfer:
    """Requests that have one event.

    A transfer that fails ends once the requests under way have ended, so that nobody's memory is written afterwards.

    State: `_left`, requests that have not ended; `_under_way`; `_error`, the first one; `over`. Changed under `_lock`.

    Parameters
    ----------
    number: transfers with lower ones go first. after: events before it. changed: condition notified when it ends.
    """

    def __init__(self, number: int, parts: list[Part], after: tuple[Event, ...], changed: threading.Condition) -> None:
        self.number, self.parts, self.after = number, parts, after
        self.event = LaneEvent()
        self.over = False
        self._left = sum(len(part.requests) for part in parts)
        self._under_way = 0
        self._error: BaseException | None = None
        self._changed = changed
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Count one request as begun; return False if no more may begin."""
        with self._lock:
            if self.over or self._error is not None:
                return False
            self._under_way += 1
            return True

    def end(self, error: BaseException | None) -> None:
        """Count one request as ended or failed."""
        with self._lock:
            self._under_way -= 1
            self._left -= 1
            self._error = self._error or error
            if not self._ends_now():
                return
        self._settle()

    def fail(self, error: BaseException, at_once: bool = False) -> None:
        """Let no more requests begin.

        Parameters
        ----------
        at_once: end it without those under way, which hang.
        """
        with self._lock:
            self._error = self._error or error
            if at_once:
                self._under_way = 0
        self.settle_if_over()

    def settle_if_over(self) -> None:
        """End it if nothing is under way and nothing more will be."""
        with self._lock:
            if not self._ends_now():
                return
        self._settle()

    def _ends_now(self) -> bool:
        """Return whether it has to be ended now, and note that it is."""
        if self.over or self._under_way > 0 or (self._left and self._error is None):
            return False
        self.over = True
        return True

    def _settle(self) -> None:
        with self._changed:
            self.event.settle(self._error)
            self._changed.notify_all()
