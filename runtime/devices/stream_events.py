"""Events of work in streams, also of work that a thread has yet to launch there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..current import stream_on
from ..events import Event, LaneEvent


class StreamEvent:
    """A point in a stream of a device, after everything that has been put on it until now."""

    def __init__(self, stream: torch.Stream) -> None:
        self._event, self._device = stream.record_event(), stream.device

    def wait(self, stream: torch.Stream | None = None) -> None:
        self._event.wait(stream_on(self._device, stream))

    def ready(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return self._event.query()


class LateEvent:
    """The completion of work that a thread has yet to start: a copy in a stream, or a transfer of the engine.

    State: `launched`, the job on that thread; `_event`, set by the job.
    """

    def __init__(self) -> None:
        self.launched: LaneEvent | None = None
        self._event: Event | None = None

    def reached(self, event: Event) -> None:
        """Note that the thread has started the work, which ends with this event."""
        self._event = event

    def wait(self, stream: torch.Stream | None = None) -> None:
        self._reach().wait(stream)

    def ready(self) -> bool:
        assert self.launched is not None
        return self.launched.done() and (self._event is None or self._event.ready())

    def synchronize(self) -> None:
        self._reach().synchronize()

    def done(self) -> bool:
        assert self.launched is not None
        return self.launched.done() and (self._event is None or self._event.done())

    def _reach(self) -> Event:
        assert self.launched is not None
        self.launched.synchronize()
        assert self._event is not None
        return self._event


class Pieces:
    """The transfers of all pieces of a tensor, as one event.

    It fails once all of them have ended, so that nobody's memory is used after the failure is known.

    State: `parts`, the transfers that have been submitted; `submitted`, the event of all of them being so.
    """

    def __init__(self) -> None:
        self.parts: list[Event] = []
        self.submitted: LaneEvent | None = None

    def wait(self, stream: torch.Stream | None = None) -> None:
        self._each(lambda part: part.wait(stream))

    def ready(self) -> bool:
        assert self.submitted is not None
        return self.submitted.done() and all(part.ready() for part in self.parts)

    def synchronize(self) -> None:
        self._each(lambda part: part.synchronize())

    def done(self) -> bool:
        assert self.submitted is not None
        return self.submitted.done() and all(part.done() for part in self.parts)

    def _each(self, wait: Callable[[Event], None]) -> None:
        failures = [error for part in self._all() if (error := _failure(wait, part)) is not None]
        if failures:
            raise failures[0]

    def _all(self) -> Iterator[Event]:
        assert self.submitted is not None
        yield self.submitted
        yield from self.parts  # whose list is complete when that has happened


def _failure(wait: Callable[[Event], None], event: Event) -> Exception | None:
    try:
        wait(event)
    except Exception as error:
        return error
    return None
