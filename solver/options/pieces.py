"""Division of optimizer states into pieces so small that moving one more or less hardly matters.

A whole state that takes a tenth of an iteration on the link leaves the device late and delays the copies behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from ..problem import Group

_PART = 0.00125  # of the bytes of all states; with four times as much, two of five steps of 7B took 1 to 2 % longer
_LEAST_BYTES = 4 << 20  # below this size the latency of a copy exceeds the time for its bytes


class Grid(NamedTuple):
    """The rows of a tensor at which its state may be cut: a piece starts at a multiple of `every`."""

    rows: int
    every: int = 1


def in_pieces(groups: Iterable[Group], grids: Mapping[str, Grid]) -> tuple[Group, ...]:
    """Return groups whose tensors' states are cut into pieces of about 1/800 of all states, or a few MiB.

    Parameters
    ----------
    grids: by name, where a tensor may be cut; a tensor that is not named stays whole.
    """
    groups = tuple(groups)
    piece = max(_LEAST_BYTES, ceil(sum(group.state_bytes for group in groups) * _PART))

    def cut(group: Group) -> Group:
        tensors = []
        for tensor in group.tensors:
            rows, every = grids.get(tensor.name, Grid(1))
            pieces = ceil(tensor.state_bytes / piece) if tensor.state_bytes % rows == 0 else 1
            most = every * ceil(rows / max(pieces, 1) / every)
            tensors.append(replace(tensor, rows=rows, piece_rows=most) if most < rows else tensor)
        return replace(group, tensors=tuple(tensors))

    return tuple(map(cut, groups))
