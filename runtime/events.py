"""Events: the completion of copies and updates, by themselves or as one that says what it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


class Event(Protocol):
    """The completion of one copy or update. A buffer and its event travel together."""

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Let what is launched on a stream from now on, the computing one by default, come after it.

        The calling thread waits only for what no stream can wait for. Raises what made it fail, if that is known.
        """
        ...

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def synchronize(self) -> None:
        """Return when it has happened; raise what made it fail."""
        ...

    def done(self) -> bool:
        """Whether it has happened."""
        ...


class ActionFailed(RuntimeError):
    """A copy or an update could not be done; says which, and why."""


@dataclass(frozen=True)
class UnderWay:
    """The copies of one item, or its update, as one event that says what it was when it fails.

    Parameters
    ----------
    what: in words, for the error. parts: all must happen; the failure of any one is the failure of the whole.
    """

    what: str
    parts: tuple[Event, ...]

    def wait(self, stream: torch.Stream | None = None) -> None:
        """As `Event.wait`, for all parts; raise ActionFailed if one could not happen."""
        for part in self.parts:
            with self._named():
                part.wait(stream)

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return all(part.ready() for part in self.parts)

    def synchronize(self) -> None:
        """Return when all parts have happened; raise ActionFailed if one could not."""
        for part in self.parts:
            with self._named():
                part.synchronize()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ActionFailed:
            raise
        except Exception as error:
            raise ActionFailed(f"{self.what} failed: {type(error).__name__}: {error}") from error

    def done(self) -> bool:
        """Whether all parts have happened."""
        return all(part.done() for part in self.parts)
