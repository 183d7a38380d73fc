"""Functions that decompose a matrix for its values alone if nothing needs a gradient, and else for vectors as well.

The two algorithms differ in the last bits of the values. A trace always takes the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError

_ATEN = torch.ops.aten
_FUNCTIONS = frozenset((
    _ATEN.linalg_svdvals, _ATEN.linalg_eigvalsh, _ATEN.linalg_norm, _ATEN.linalg_matrix_norm, _ATEN.linalg_cond,
    _ATEN.linalg_matrix_rank, _ATEN.norm, _ATEN.nuclear_norm,
    torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.norm, torch.linalg.matrix_norm, torch.linalg.cond,
    torch.linalg.matrix_rank, torch.norm, torch.Tensor.norm, torch.nuclear_norm,
))  # fmt: skip
_NORMS = (torch.norm, torch.Tensor.norm, torch.linalg.norm)
_SVD = (_ATEN.svd, torch.svd, torch.Tensor.svd)


def asks_for_values(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of an operator or a function asks for no vectors."""
    packet = getattr(called, "overloadpacket", called)
    if packet in _SVD:
        return not kwargs.get("compute_uv", args[2] if len(args) > 2 else True)
    return packet in _FUNCTIONS


class ValuesRefused(TorchFunctionMode):
    """Refuses such calls where eager mode makes each twice, without gradients and with them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain_norm = func in _NORMS and not any(isinstance(a, str) and a == "nuc" for a in (*args, *kwargs.values()))
        if asks_for_values(func, args, kwargs) and not plain_norm:
            raise CaptureError(
                f"a checkpoint with use_reentrant=True calls {func.__name__}, whose last bits depend on whether "
                "gradients are recorded, and such a checkpoint does not record them in its forward. Pass "
                "use_reentrant=False"
            )
        return func(*args, **kwargs)
