"""Which tensors can be updated some rows at a time, with the bits of one update."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch

from .joint import dense_stride
from .solver.pieces import Grid

# What an element becomes depends on its own gradient and state, and on numbers that a tensor's elements share. Classes
# derived from these may do something else.
_BY_ELEMENT = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    }
)
# Elements that no kernel treats apart: what a processor takes at once, and a cache line. Where the rest of a tensor
# that makes no whole number of them is updated in another way, only its own last ones are, cut or not.
_TOGETHER = 64


def works_by_element(kind: Any) -> bool:
    """Whether an optimizer class, with master weights or without, updates every element of a tensor by itself."""
    return getattr(kind, "_kind", kind) in _BY_ELEMENT


def grid_of(tensor: torch.Tensor) -> Grid | None:
    """Where a tensor may be cut into rows that are stretches of memory without gaps; None if nowhere.

    Parameters
    ----------
    tensor: shape and strides; no data are read.
    """
    if tensor.dim() == 0 or tensor.numel() == 0:
        return None
    rows, size = tensor.shape[0], tensor.numel()
    if tensor.stride(0) * rows != size or dense_stride(tensor) != tensor.stride():
        return None
    return Grid(rows, _TOGETHER // gcd(_TOGETHER, size // rows))
