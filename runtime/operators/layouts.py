"""A copy in another layout, as an operator that a trace can hold."""

from __future__ import annotations

import torch

from ..layouts import as_layout

_LIBRARY = torch.library.Library("offmate", "FRAGMENT")
_LIBRARY.define("lay_out(Tensor tensor, SymInt[] size, SymInt[] stride) -> Tensor")
_LIBRARY.impl("lay_out", as_layout, "CompositeExplicitAutograd")


@torch.library.register_fake("offmate::lay_out", lib=_LIBRARY)
def _(tensor, size, stride):
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)


lay_out = torch.ops.offmate.lay_out.default
"""lay_out(tensor, size, stride): `as_layout` as an operator; strides may leave gaps."""
