"""Random numbers drawn into storage of a given layout: the order of draws in a tensor depends on its strides."""

from __future__ import annotations

import torch

_OPTIONS = "SymInt[] size, SymInt[] stride, ScalarType dtype, Device device"
_LIBRARY = torch.library.Library("offmate", "FRAGMENT")
_DRAWS = (torch.Tag.nondeterministic_seeded,)
_LIBRARY.define(f"draw(str method, Scalar[] numbers, {_OPTIONS}) -> Tensor", tags=_DRAWS)
_LIBRARY.define(f"draw_bernoulli(Tensor p, {_OPTIONS}) -> Tensor", tags=_DRAWS)


def _draw(
    method: str, numbers: list[float], size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    empty = torch.empty_strided(size, stride, dtype=dtype, device=device)
    drawn: torch.Tensor = getattr(empty, method)(*numbers)
    return drawn


def _draw_bernoulli(
    p: torch.Tensor, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device).bernoulli_(p)


for _name, _kernel in (("draw", _draw), ("draw_bernoulli", _draw_bernoulli)):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("offmate::draw", lib=_LIBRARY)
def _(method, numbers, size, stride, dtype, device):
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@torch.library.register_fake("offmate::draw_bernoulli", lib=_LIBRARY)
def _(p, size, stride, dtype, device):
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


draw = torch.ops.offmate.draw.default
"""draw(method, numbers, size, stride, dtype, device): a new tensor, filled by that in-place method of tensors."""
draw_bernoulli = torch.ops.offmate.draw_bernoulli.default
"""draw_bernoulli(p, size, stride, dtype, device): a new tensor, filled by `bernoulli_` with probabilities `p`."""
