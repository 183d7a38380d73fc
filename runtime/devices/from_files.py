"""Bytes of files on their way to a device: read into pinned buffers, which are copied on in turn."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Protocol

import torch

from ...solver.resources import Resource
from ..events import Event, LaneEvent
from ..storage.file_bytes import FileBytes
from ..storage.host_bytes import ALIGNMENT_BYTES
from ..trace import RecordedJob, Recorder
from .lanes import Lane

log = logging.getLogger("offmate")

_PIECE_BYTES = 1 << 24
_BUFFERS = 4  # one is copied on while the others are filled
BUFFERS_BYTES = _BUFFERS * (_PIECE_BYTES + ALIGNMENT_BYTES)


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


class Pieces:
    """The copies of all pieces of a tensor, as one event.

    State: `parts`, the copies that have been submitted; `submitted`, the event of all of them being so.
    """

    def __init__(self) -> None:
        self.parts: list[Event] = []
        self.submitted: LaneEvent | None = None

    def wait(self, stream: torch.Stream | None = None) -> None:
        for part in self._all():
            part.wait(stream)

    def ready(self) -> bool:
        assert self.submitted is not None
        return self.submitted.done() and all(part.ready() for part in self.parts)

    def synchronize(self) -> None:
        for part in self._all():
            part.synchronize()

    def done(self) -> bool:
        assert self.submitted is not None
        return self.submitted.done() and all(part.done() for part in self.parts)

    def _all(self) -> list[Event]:
        assert self.submitted is not None
        self.submitted.synchronize()
        return self.parts


class FromFiles:
    """A thread that reads files piece by piece into a ring of pinned buffers.

    State: `_ring`, made at the first read, and `_used`, by buffer, the event of its last copy; used by the thread
    alone.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self.lane = Lane("files", 1, changed)
        self._ring: list[torch.Tensor] = []
        self._used: list[Event | None] = []
        self._next = 0

    def bring(
        self, target: torch.Tensor, source: FileBytes, launch: Launch, recorder: Recorder | None, link: Resource
    ) -> Pieces:
        """Start to read a tensor's bytes to the device.

        Parameters
        ----------
        target: its flat bytes there. recorder: times the reads over the link and the copies; None if nothing does.
        """
        pieces, starts = Pieces(), range(0, target.numel(), _PIECE_BYTES)

        def job(resource: Resource, size_bytes: int) -> RecordedJob | None:
            return None if recorder is None else recorder.job(resource, size_bytes)

        reads = job(link, target.numel())
        copies = [job(Resource.IN, min(_PIECE_BYTES, target.numel() - start)) for start in starts]

        def work() -> None:
            if reads is not None:
                reads.begins_now()
            for start, copied in zip(starts, copies):
                slot = self._free_slot()
                own = target[start : start + _PIECE_BYTES]
                # As far from a block's beginning as in the file, so that whole blocks are read to where they belong.
                first = (source.start + start) % ALIGNMENT_BYTES
                piece = self._ring[slot][first : first + own.numel()]
                read = source.read(piece, start)
                event = self._used[slot] = launch(own, piece, read, copied)
                pieces.parts.append(event)
            if reads is not None:
                read.synchronize()
                reads.ends_now()

        pieces.submitted = self.lane.submit(work, ())
        return pieces

    def _free_slot(self) -> int:
        """Return the buffer that was filled longest ago, once its copy has ended."""
        if not self._ring:
            self._ring = [_pinned(_PIECE_BYTES + ALIGNMENT_BYTES) for _ in range(_BUFFERS)]
            self._used = [None] * _BUFFERS
        slot, self._next = self._next, (self._next + 1) % _BUFFERS
        used = self._used[slot]
        if used is not None:
            with contextlib.suppress(Exception):  # whoever waits for the tensor is told
                used.synchronize()
        return slot


def _pinned(size_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.debug("a buffer for files of %d bytes cannot be pinned (%s)", size_bytes, error)
        return torch.empty(size_bytes, dtype=torch.uint8)
