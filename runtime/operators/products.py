"""The backward of a product of elements as eager mode computes it, by a rule that depends on the values.

Without a zero among the elements eager mode divides; with one it multiplies the others. A trace cannot look at values,
so PyTorch traces the second, whose last bits differ. This operator lets autograd choose at each run.
"""

from __future__ import annotations

import torch

from ..layouts import as_layout

_LIBRARY = torch.library.Library("offmate", "FRAGMENT")
_LIBRARY.define("product_backward(Tensor grad, Tensor input, int? dim, bool keepdim, ScalarType? dtype) -> Tensor")


def _product_backward(
    grad: torch.Tensor, input: torch.Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    with torch.enable_grad():
        leaf = input.detach().requires_grad_()
        result = leaf.prod(dtype=dtype) if dim is None else leaf.prod(dim, keepdim, dtype=dtype)
    return as_layout(torch.autograd.grad(result, leaf, grad)[0], input.shape, _strides(input))


def _strides(input: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of the gradient, with and without data: the input's if it is dense, else similar ones."""
    return torch.empty_like(torch.empty_strided(input.shape, input.stride(), device="meta")).stride()


_LIBRARY.impl("product_backward", _product_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("offmate::product_backward", lib=_LIBRARY)
def _(grad, input, dim, keepdim, dtype):
    return torch.empty_strided(input.shape, _strides(input), dtype=input.dtype, device=input.device)


product_backward = torch.ops.offmate.product_backward.default
"""product_backward(grad, input, dim, keepdim, dtype): the gradient of `input.prod(dim, keepdim, dtype=dtype)`."""
