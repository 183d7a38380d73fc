"""Bytes of files on their way to a device: read into pinned buffers, which are copied on in turn."""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from ...solver.resources import Resource
from ..events import Event
from ..storage.file_bytes import BytesInFile
from ..trace import RecordedJob, Recorder, recorded
from .lanes import Lane
from .ring import Ring, pieces_of
from .stream_events import Pieces


class Launch(Protocol):
    """Launches a copy of a piece to the device."""

    def __call__(self, target: torch.Tensor, piece: torch.Tensor, read: Event, job: RecordedJob | None) -> Event:
        """Copy a piece on, once it has been read.

        Parameters
        ----------
        target: flat bytes on the device. piece: the same bytes on the host, which are there after `read`. job: what
            times the copy; None if nothing does.
        """
        ...


class FromFiles:
    """A thread that reads files piece by piece into a ring of pinned buffers, which it alone uses.

    Of the tensors whose events have happened, the one submitted first goes first.

    Parameters
    ----------
    name, changed, n_threads, niceness: of its lane; what is read from RAM is computed there.
    """

    def __init__(self, name: str, changed: threading.Condition, n_threads: int = 1, niceness: int = 0) -> None:
        # A point in a stream notifies nobody when it is reached. So a job begins once all its events are in streams, or
        # have happened on threads, and waits for the streams itself.
        self.lane = Lane(name, n_threads, changed, launches=True, niceness=niceness)
        self._ring = Ring()

    def bring(
        self,
        target: torch.Tensor,
        source: BytesInFile,
        after: tuple[Event, ...],
        launch: Launch,
        recorder: Recorder | None,
        link: Resource,
    ) -> Pieces:
        """Start to read a tensor's bytes to the device.

        Parameters
        ----------
        target: its flat bytes there. after: events before the first read. recorder: times the reads over the link and
            the copies; None if nothing does.
        """
        copied, ranges = Pieces(), pieces_of(source.start, target.numel())
        (reads,) = recorded(recorder, link, [target.numel()])
        copies = recorded(recorder, Resource.IN, [end - start for start, end in ranges])

        def work() -> None:
            for event in after:
                event.synchronize()
            if reads is not None:
                reads.begins_now()
            for (start, end), copy in zip(ranges, copies):
                piece = self._ring.take(source.start + start, end - start)
                read = source.read(piece, start)
                event = launch(target[start:end], piece, read, copy)
                self._ring.keep(event)
                copied.parts.append(event)
            if reads is not None:
                read.synchronize()
                reads.ends_now()

        copied.submitted = self.lane.submit(work, after)
        return copied
