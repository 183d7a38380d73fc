"""Pinned buffers through which memory that is not pinned is copied to and from a device."""

from __future__ import annotations

import logging
import threading
from collections import deque

import torch

log = logging.getLogger("offmate")

_BUFFERS = 2  # one is filled while the other is emptied
_MOST_BYTES, _LEAST_BYTES = 1 << 23, 1 << 20


class Staging:
    """Two pinned buffers for one direction, kept for the process: systems may pin little, and pools take all of it.

    State: `_blocks`, and `_used`, by buffer, the event of its last copy to a device; changed under `_lock`, which the
    thread that copies holds.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._used: list[torch.Event | None] = []
        self._lock = threading.Lock()

    def grow(self) -> None:
        """Take one buffer more, as large as the system pins it, unless there are enough."""
        with self._lock:
            size = _MOST_BYTES if len(self._blocks) < _BUFFERS else 0
            while size >= _LEAST_BYTES:
                try:
                    self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
                    self._used.append(None)
                    return
                except RuntimeError as error:
                    log.debug("no staging buffer of %d bytes (%s)", size, error)
                    size //= 2

    @property
    def exists(self) -> bool:
        """Return whether there is any buffer."""
        return bool(self._blocks)

    def bring(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """Copy flat bytes of the host to a device; the last of them are under way on return."""
        with self._lock:
            size = self._piece_bytes
            for i, start in enumerate(range(0, source.numel(), size)):
                slot = i % len(self._blocks)
                used = self._used[slot]
                if used is not None:
                    used.synchronize()
                piece = self._blocks[slot][: min(size, source.numel() - start)]
                piece.copy_(source[start : start + piece.numel()])
                with stream:
                    target[start : start + piece.numel()].copy_(piece, non_blocking=True)
                    self._used[slot] = stream.record_event()

    def send(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """Copy flat bytes of a device to the host, one piece from the device while another goes on; done on return."""
        with self._lock:
            size = self._piece_bytes
            under_way: deque[tuple[torch.Tensor, torch.Tensor, torch.Event]] = deque()
            for i, start in enumerate(range(0, source.numel(), size)):
                if len(under_way) == len(self._blocks):
                    _deliver(*under_way.popleft())
                piece = self._blocks[i % len(self._blocks)][: min(size, source.numel() - start)]
                with stream:
                    piece.copy_(source[start : start + piece.numel()], non_blocking=True)
                    under_way.append((target[start : start + piece.numel()], piece, stream.record_event()))
            while under_way:
                _deliver(*under_way.popleft())

    @property
    def _piece_bytes(self) -> int:
        return min(buffer.numel() for buffer in self._blocks)


def _deliver(target: torch.Tensor, piece: torch.Tensor, arrived: torch.Event) -> None:
    arrived.synchronize()
    target.copy_(piece)


INTO, OUT_OF = Staging(), Staging()
"""The buffers of all devices of this process, by direction."""


def reserve() -> None:
    """Take the buffers of both directions, in turn; call it before anything else takes pinned memory."""
    for _ in range(_BUFFERS):
        for direction in (INTO, OUT_OF):
            direction.grow()
