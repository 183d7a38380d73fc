"""The host memory in which gradients arrive before they are added to their totals."""

from __future__ import annotations

from typing import NamedTuple

from .packing import aligned

N_BUFFERS = 2


class Place(NamedTuple):
    """A part of a buffer, from its first byte to the one behind its last."""

    buffer: int
    start_bytes: int
    end_bytes: int

    def overlaps(self, other: Place) -> bool:
        """Return whether two places share bytes."""
        in_both = self.start_bytes < other.end_bytes and other.start_bytes < self.end_bytes
        return self.buffer == other.buffer and in_both


class Arrivals:
    """Gives gradients their places in two buffers, each as large as the largest of them.

    In a buffer gradients lie one behind the other. One that no longer fits there goes to the start of the other buffer.
    So a gradient never shares bytes with the previous one, and where several are small, many of them are on their way.

    State: `_last`, the place that was given last.

    Parameters
    ----------
    buffer_bytes: size of a buffer.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._last = Place(0, 0, 0)

    def place(self, n_bytes: int) -> Place:
        """Return the place of the next gradient.

        Parameters
        ----------
        n_bytes: its size, at most that of a buffer.
        """
        assert n_bytes <= self._buffer_bytes, (n_bytes, self._buffer_bytes)
        buffer, start = self._last.buffer, aligned(self._last.end_bytes)
        if start + n_bytes > self._buffer_bytes:
            buffer, start = (buffer + 1) % N_BUFFERS, 0
        self._last = Place(buffer, start, start + n_bytes)
        return self._last
