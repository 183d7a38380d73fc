"""Row-wise updates: which tensors can be updated some rows at a time, with the bits of one whole update."""

from __future__ import annotations

from math import gcd, lcm
from typing import Any

import torch

from ..capture.spec import dense_stride
from ..solver.options.pieces import Grid

# Element-wise optimizers: an element's new value depends on its own gradient and state, and on numbers that all
# elements of a tensor share. Subclasses of these may do something else.
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
# Number of elements that no kernel separates: a vector register's or a cache line's. If a kernel updates a shorter
# remainder in another way, then that remainder is the end of the tensor, whether the tensor is cut or not.
_TOGETHER = 64


# Their fused kernels treat all elements alike in lower precision than float32, too, and give threads whole cache lines.
_FUSED_ALIKE = frozenset({torch.optim.Adam, torch.optim.AdamW})


def works_by_element(kind: Any) -> bool:
    """Return whether an optimizer class, with master weights or without, updates every element independently."""
    return vars(kind).get("_kind", kind) in _BY_ELEMENT  # a subclass of either may do something else


def depends_on_threads(kind: Any, hyper: dict[str, Any], dtype: torch.dtype) -> bool:
    """Return whether the bits of a CPU update may depend on how many threads share a tensor, and so on its cuts.

    Sums over a tensor do. And in lower precision than float32, the last elements of each thread, which do not fill a
    vector, are rounded more often than the others.

    Parameters
    ----------
    kind: with master weights or without. hyper: of the parameter's group. dtype: of the parameter.
    """
    if not works_by_element(kind):
        return True
    inner = vars(kind).get("_kind")
    low = dtype in (torch.bfloat16, torch.float16) and inner is None
    return low and not (hyper.get("fused") and kind in _FUSED_ALIKE)


def grid_of(tensor: torch.Tensor, together: int = 1) -> Grid | None:
    """Return where a tensor may be cut into rows that are contiguous stretches of memory; None if nowhere.

    Parameters
    ----------
    tensor: shape and strides; no data are read. together: a number of elements of which pieces have a multiple.
    """
    if tensor.dim() == 0 or tensor.numel() == 0:
        return None
    rows, size = tensor.shape[0], tensor.numel()
    if tensor.stride(0) * rows != size or dense_stride(tensor) != tensor.stride():
        return None
    together = lcm(_TOGETHER, together)
    return Grid(rows, together // gcd(together, size // rows))
