"""Where optimizer states are cut: pieces small enough that moving one more or less hardly matters.

A whole state that takes a tenth of an iteration on the link leaves the device late and holds up what comes behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from ..problem import Group

_PART = 0.005  # of all states
_LEAST_BYTES = 4 << 20  # below it copies take more for being begun than for their bytes


class Grid(NamedTuple):
    """Where a tensor may be cut: how many rows it has, and that a piece starts at a multiple of `every`."""

    rows: int
    every: int = 1


def in_pieces(groups: Iterable[Group], grids: Mapping[str, Grid]) -> tuple[Group, ...]:
    """Groups whose tensors' states are cut into pieces of about one two-hundredth of all states, or a few MiB.

    Parameters
    ----------
    grids: by name where a tensor may be cut; one that is not named stays whole.
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
