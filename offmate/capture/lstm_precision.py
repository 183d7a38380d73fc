"""The precision of an LSTM's outputs under autocast, which an export takes for float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..guards.surroundings import AUTOCAST_KINDS
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.tracing import FakeTensorMode, outside_of_modes


class LstmPrecision(TorchFunctionMode):
    """Gives the outputs of an LSTM that is exported the precision that they have in eager mode.

    An export switches off the kernel that autocast casts for. What the forward asks of the outputs (a cast, a state of
    their precision) would be answered wrongly. Made before the export begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mkldnn = bool(torch.backends.mkldnn.enabled)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func != torch.lstm or not any(map(torch.is_autocast_enabled, AUTOCAST_KINDS)):
            return outputs
        kernels = torch.backends.mkldnn.flags(enabled=self._mkldnn, allow_tf32=torch.backends.mkldnn.allow_tf32)
        with outside_of_modes(), kernels, FakeTensorMode():
            given, named = pytree.tree_map(_like, (args, kwargs or {}))
            true = func(*given, **named)
        return tuple(output.to(like.dtype) for output, like in zip(outputs, true, strict=True))


def _like(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    empty = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return empty.requires_grad_(leaf.requires_grad)
