"""Bytes of a device on their way to files: copied into pinned buffers, which are written in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ...solver.resources import Resource
from ..events import Event
from ..storage.file_bytes import WritableBytes
from ..trace import RecordedJob, Recorder, recorded
from .lanes import Lane
from .ring import Ring, pieces_of
from .stream_events import LateEvent, Pieces

_POLL_S = 1e-3  # interval at which arriving pieces are looked at; other pieces are being written meanwhile

Launch = Callable[[torch.Tensor, torch.Tensor, RecordedJob | None], Event]
"""Launches a copy to a piece on the host, from flat bytes on the device, with what times it."""


class ToFiles:
    """Two threads and a ring of pinned buffers between them.

    The first launches the copies of pieces to the buffers, and waits for a free one. The second gives the engine each
    piece that has arrived. So whoever waits until a tensor's copies are launched does not wait for the copies.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._copies = Lane("to-files", 1, changed, launches=True)
        self._writes = Lane("file-writes", 1, changed, poll_s=_POLL_S)
        self.lanes = (self._copies, self._writes)  # in the order in which they give each other work
        self._ring = Ring()

    def send(
        self,
        target: WritableBytes,
        source: torch.Tensor,
        after: tuple[Event, ...],
        launch: Launch,
        recorder: Recorder | None,
        link: Resource,
    ) -> tuple[Pieces, Pieces]:
        """Start to write a tensor's bytes to a file.

        Parameters
        ----------
        source: its flat bytes on the device. after: events before the copies. recorder: times the copies and the writes
            over the link; None if nothing does.

        Returns: the copies to the host, and the writes, each as one event.
        """
        left, written, ranges = Pieces(), Pieces(), pieces_of(target.start, source.numel())
        copies = recorded(recorder, Resource.OUT, [end - start for start, end in ranges])
        (writes,) = recorded(recorder, link, [source.numel()])

        def work() -> None:
            for (start, end), copy in zip(ranges, copies):
                piece = self._ring.take(target.start + start, end - start)
                arrived = launch(piece, source[start:end], copy)
                begins, ends = writes if start == 0 else None, writes if end == source.numel() else None
                event = self._write(target, piece, start, arrived, begins, ends)
                self._ring.keep(event)
                left.parts.append(arrived)
                written.parts.append(event)

        left.submitted = written.submitted = self._copies.submit(work, after)
        return left, written

    def _write(
        self,
        target: WritableBytes,
        piece: torch.Tensor,
        start: int,
        arrived: Event,
        begins: RecordedJob | None,
        ends: RecordedJob | None,
    ) -> LateEvent:
        """Have a piece written once it has arrived; it may be the first or the last of what a job times."""
        event = LateEvent()

        def work() -> None:
            if begins is not None:
                begins.begins_now()
            write = target.write(piece, start)
            event.reached(write)
            if ends is not None:
                write.synchronize()
                ends.ends_now()

        event.launched = self._writes.submit(work, (arrived,))
        return event

    def synchronize(self) -> None:
        """Block until the engine has written what it was given, failed or not; both threads must be idle."""
        self._ring.synchronize()
