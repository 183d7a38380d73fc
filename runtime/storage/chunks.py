"""How a stored tensor is cut into chunks, each of which one request reads or writes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ...errors import ArgumentValueError
from .host_bytes import ALIGNMENT_BYTES
from .ranges import Range


class Chunks:
    """The chunks of a tensor in order, by number.

    Parameters
    ----------
    bounds: offsets in bytes at which chunks begin, ascending from 0, and last the number of the tensor's bytes.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = tuple(bounds)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return self._bounds[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the bytes of each chunk."""
        return tuple(end - start for start, end in zip(self._bounds, self._bounds[1:]))

    def at(self, offset: int) -> int:
        """Return the chunk that has a byte."""
        return bisect_right(self._bounds, offset) - 1

    def within(self, start: int, end: int) -> range:
        """Return the chunks that have any of the bytes from one offset to another."""
        return range(self.at(start), self.at(end - 1) + 1) if end > start else range(0)

    def range_of(self, chunk: int) -> Range:
        """Return the bytes of the tensor that a chunk has."""
        return self._bounds[chunk], self._bounds[chunk + 1]


def cut(name: str, n_bytes: int, most_bytes: int, cuts: Sequence[int]) -> Chunks:
    """Cut a tensor into chunks.

    Parameters
    ----------
    name: of the tensor, for messages. n_bytes: its bytes. most_bytes: of a chunk, a multiple of 4,096.
    cuts: offsets in bytes at which pieces of the tensor begin, in any order. A chunk begins at each that is a multiple
        of 4,096. At another one it cannot, so that the pieces on both sides share a chunk.

    Raises: ArgumentValueError for a cut that is not within the tensor.
    """
    outside = [place for place in cuts if not 0 <= place <= n_bytes]
    if outside:
        raise ArgumentValueError(
            f"cuts={outside} are not within {name}, which has {n_bytes} bytes; give offsets in bytes of its pieces"
        )
    begins = sorted({0, *(place for place in cuts if place % ALIGNMENT_BYTES == 0 and place < n_bytes)})
    bounds = [start for first, last in zip(begins, [*begins[1:], n_bytes]) for start in range(first, last, most_bytes)]
    return Chunks([*bounds, n_bytes])
