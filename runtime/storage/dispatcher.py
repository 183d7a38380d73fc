"""One thread that lets transfers begin once their events have happened, and notices disks that hang."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from ...errors import StorageError
from ..events import Event
from .disks import Disks
from .transfers import Part, Transfer

_MOST_S = 1.0  # between two looks at disks and events, whoever notifies


class Dispatcher:
    """Gives transfers to the queues of their disks.

    State: `_waiting`, transfers with events that have not happened; `_number`, transfers until now; `_closed`,
    what is raised once it is closed. All are changed under the condition.

    Parameters
    ----------
    changed: condition notified of everything that transfers may wait for, and of the end of each transfer; the lanes of
        a device share it. poll_s: interval at which events of a device, which notify nobody, are polled; None if there
        are none.
    """

    def __init__(self, disks: Disks, changed: threading.Condition, poll_s: float | None) -> None:
        self._disks = disks
        self._changed, self._poll_s = changed, poll_s
        self._deadline_s = disks.limits.deadline_s
        self._look_s = min(_MOST_S, self._deadline_s / 4)
        self._waiting: list[Transfer] = []
        self._number = 0
        self._closed: StorageError | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="offmate-storage", daemon=True)
        self._thread.start()

    def submit(self, parts: Sequence[Part], after: Sequence[Event], urgent: bool = False) -> Transfer:
        """Have the requests of parts done once events have happened.

        Parameters
        ----------
        urgent: before all others that have not begun.

        Raises: StorageError after `close`, and in a forked process, which has none of the threads.
        """
        if not self.works_here():
            raise StorageError("a storage engine works only in the process that made it; make another one in this one")
        with self._changed:
            if self._closed is not None:
                raise self._closed
            self._number += 1
            transfer = Transfer(0 if urgent else self._number, list(parts), tuple(after), self._changed)
            begins = all(map(_happened, transfer.after))
            if not begins:
                self._waiting.append(transfer)
                self._changed.notify_all()
        if begins:
            _begin(transfer)
        return transfer

    def works_here(self) -> bool:
        """Return whether this process has the threads; in a forked one a lock may be held for ever."""
        return os.getpid() == self._process

    def is_open(self) -> bool:
        """Return whether it takes transfers of this process."""
        return self.works_here() and self._closed is None

    def within_deadline(self, work: Callable[[], None]) -> Exception | None:
        """Do something to a disk that may hang; return what it raises, or that it hangs."""
        failures: list[Exception] = [
            StorageError("removing stored files hangs; the next run in their folder removes them")
        ]

        def attempt() -> None:
            try:
                work()
                failures.clear()
            except Exception as error:
                failures[0] = error

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(self._deadline_s)
        return failures[0] if failures else None

    def close(self) -> bool:
        """Fail what has not begun and end all threads; return whether they have ended, as `DiskQueue.close` does."""
        error = StorageError("the storage engine was closed before the transfer had ended; close it after the last one")
        with self._changed:
            self._closed = self._closed or error
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
        for transfer in waiting:
            transfer.fail(error)
        if self._thread is not threading.current_thread():
            self._thread.join(self._deadline_s)
        ended = [queue.close(error) for queue in self._disks.all()]
        return all(ended)

    def _run(self) -> None:
        while (ready := self._ready()) is not None:
            while ready:
                _begin(ready.pop(0))  # under no name here: with its error it would keep all that its caller holds
            for queue in self._disks.all():
                queue.fail_if_it_hangs()

    def _ready(self) -> list[Transfer] | None:
        """Return waiting transfers that may begin; none after a while, and None once closed."""
        with self._changed:
            ready = self._take()
            if not ready and self._closed is None:
                self._changed.wait(self._poll_s if self._waiting and self._poll_s is not None else self._look_s)
                ready = self._take()
            return ready if self._closed is None else None

    def _take(self) -> list[Transfer]:
        ready = [one for one in self._waiting if all(map(_happened, one.after))]
        if ready:
            self._waiting = [one for one in self._waiting if one not in ready]
        return ready


def _begin(transfer: Transfer) -> None:
    """Give a transfer to its queues; it fails if something that it waited for did."""
    try:
        for event in transfer.after:
            event.synchronize()
    except BaseException as error:
        transfer.fail(error)
        return
    for part in tuple(transfer.parts):
        part.queue.add(part, transfer)
    transfer.settle_if_over()  # one without bytes has no requests


def _happened(event: Event) -> bool:
    try:
        return event.done()
    except Exception:  # waiting for it raises the same, and the transfer then fails with it
        return True
