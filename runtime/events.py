"""Events: the completion of copies and updates, alone or in groups that name what they are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import OffmateError


class Event(Protocol):
    """The completion of one copy or update. A buffer and its event travel together."""

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Let work launched on a stream from now on, by default the computing one, come after it.

        The calling thread blocks only if no stream can wait for the event. Raises the error that made it fail, if that
        is known.
        """
        ...

    def ready(self) -> bool:
        """Return whether `wait` would return at once."""
        ...

    def synchronize(self) -> None:
        """Block until it has happened; raise the error that made it fail."""
        ...

    def done(self) -> bool:
        """Return whether it has happened."""
        ...


class LaneEvent:
    """The completion of a job on a thread. A stream cannot wait for it, so `wait` blocks the calling thread."""

    def __init__(self) -> None:
        self._happened = threading.Event()
        self._error: BaseException | None = None

    def wait(self, stream: torch.Stream | None = None) -> None:
        self.synchronize()

    def ready(self) -> bool:
        return self.done()

    def synchronize(self) -> None:
        self._happened.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._happened.is_set()

    def settle(self, error: BaseException | None = None) -> None:
        """Mark it as happened, or as failed with `error`."""
        self._error = error
        self._happened.set()


class ActionFailed(RuntimeError):
    """A copy or an update that could not be done; the message says which one, and why."""


@dataclass(frozen=True)
class Ended:
    """The end of others, whether they have happened or failed; whoever waits for these themselves is told."""

    parts: tuple[Event, ...]

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Block until all have ended."""
        self.synchronize()

    def ready(self) -> bool:
        """Return whether all have ended."""
        return self.done()

    def synchronize(self) -> None:
        """Block until all have ended."""
        for part in self.parts:
            with contextlib.suppress(Exception):
                part.synchronize()

    def done(self) -> bool:
        """Return whether all have ended."""
        return all(part.done() for part in self.parts)


@dataclass(frozen=True)
class UnderWay:
    """The copies of one item, or its update, as one event that names itself when it fails.

    Parameters
    ----------
    what: description for the error message. parts: events that must all happen; the failure of any one is the failure
        of the whole.
    """

    what: str
    parts: tuple[Event, ...]

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Wait for all parts, as `Event.wait` does; raise ActionFailed if one could not happen."""
        for part in self.parts:
            with self._named():
                part.wait(stream)

    def ready(self) -> bool:
        """Return whether `wait` would return at once."""
        return all(part.ready() for part in self.parts)

    def synchronize(self) -> None:
        """Block until all parts have ended; raise ActionFailed if one could not happen."""
        failures: list[ActionFailed] = []
        for part in self.parts:  # all of them: once this has failed, their memory may be used again
            try:
                with self._named():
                    part.synchronize()
            except ActionFailed as error:
                failures.append(error)
        if failures:
            raise failures[0]

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ActionFailed:
            raise
        except Exception as error:
            name = "" if isinstance(error, OffmateError) else f"{type(error).__name__}: "
            raise ActionFailed(f"{self.what} failed: {name}{error}") from error

    def done(self) -> bool:
        """Return whether all parts have happened."""
        return all(part.done() for part in self.parts)
