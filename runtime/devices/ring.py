"""Pinned buffers that the bytes of files pass in turn, on their way to a device or from it."""

from __future__ import annotations

import contextlib
import logging
from itertools import pairwise

import torch

from ..events import Event
from ..storage.host_bytes import ALIGNMENT_BYTES

log = logging.getLogger("offmate")

_PIECE_BYTES = 1 << 24
_BUFFERS = 4  # one is emptied while the others are filled
BUFFERS_BYTES = _BUFFERS * (_PIECE_BYTES + ALIGNMENT_BYTES)
"""The bytes of one ring."""


def pieces_of(start: int, n_bytes: int) -> list[tuple[int, int]]:
    """Return the pieces in which a tensor passes a ring, as offsets of their first byte and of their end.

    They are cut at multiples of a piece's bytes in the file, so that no block and no chunk there belongs to two pieces.

    Parameters
    ----------
    start: offset in bytes of the tensor's first one in the file. n_bytes: of the tensor; one without any is one piece.
    """
    cuts = range(_PIECE_BYTES - start % _PIECE_BYTES, n_bytes, _PIECE_BYTES)
    return list(pairwise((0, *cuts, n_bytes)))


class Ring:
    """Buffers that one thread uses in turn.

    State: `_buffers`, made at the first use; `_used`, by buffer, the event after which it may be filled again; `_slot`,
    the buffer that was taken last. All are changed by that thread.
    """

    def __init__(self) -> None:
        self._slots: list[torch.Tensor] = []
        self._used: list[Event | None] = []
        self._slot = -1

    def take(self, start: int, n_bytes: int) -> torch.Tensor:
        """Return flat bytes of the buffer that was filled longest ago, once it may be filled again.

        Parameters
        ----------
        start: offset in the file of the first byte. The memory is as far from a block's beginning as the file is there,
            so that whole blocks are transferred without a second copy.
        """
        if not self._slots:
            self._slots = [_pinned(_PIECE_BYTES + ALIGNMENT_BYTES) for _ in range(_BUFFERS)]
            self._used = [None] * _BUFFERS
        self._slot = (self._slot + 1) % len(self._slots)
        _wait_for(self._used[self._slot])
        first = start % ALIGNMENT_BYTES
        return self._slots[self._slot][first : first + n_bytes]

    def keep(self, event: Event) -> None:
        """Have the buffer that was taken last stay as it is until an event."""
        self._used[self._slot] = event

    def synchronize(self) -> None:
        """Block until all buffers may be filled again; call it while the thread that uses them is idle."""
        for event in self._used:
            _wait_for(event)


def _wait_for(event: Event | None) -> None:
    if event is not None:
        with contextlib.suppress(Exception):  # whoever waits for the tensor is told
            event.synchronize()


def _pinned(size_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.debug("a buffer for files of %d bytes cannot be pinned (%s)", size_bytes, error)
        return torch.empty(size_bytes, dtype=torch.uint8)
