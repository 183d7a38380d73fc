"""Random draws in a traced block, made as in eager mode.

Eager mode draws in place, and the order in which numbers fill a tensor depends on its strides. In a functional graph a
draw makes a new tensor, whose kernel chooses other strides: dropout of a transposed input would get another mask. So a
draw in such a graph states which strides it fills. A model's own generators never occur here, since they do not export.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..runtime.operators.draws import draw, draw_bernoulli

aten = torch.ops.aten
_METHODS = {
    aten.bernoulli.p: "bernoulli_",
    aten.uniform.default: "uniform_",
    aten.normal_functional.default: "normal_",
    aten.exponential.default: "exponential_",
    aten.cauchy.default: "cauchy_",
    aten.log_normal.default: "log_normal_",
    aten.geometric.default: "geometric_",
    aten.random.default: "random_",
    aten.random.to: "random_",
    getattr(aten.random, "from"): "random_",
}


def _layout(tensor: torch.Tensor) -> tuple[list[int], list[int], torch.dtype, torch.device]:
    return list(tensor.shape), list(tensor.stride()), tensor.dtype, tensor.device


def _drawing(method: str) -> Callable[..., torch.Tensor]:
    def drawn(target: torch.Tensor, *numbers: Any, generator: None = None, **named: Any) -> Any:
        return draw(method, [*numbers, *named.values()], *_layout(target))

    return drawn


def _drawing_by_chances(target: torch.Tensor, p: torch.Tensor, generator: None = None) -> Any:
    return draw_bernoulli(p, *_layout(target))


FUNCTIONAL: dict[Any, Callable[..., torch.Tensor]] = {
    **{target: _drawing(method) for target, method in _METHODS.items()},
    aten.bernoulli.Tensor: _drawing_by_chances,
}
"""The functional form of each draw in place, by the operator into which functionalisation turns it."""


def _bernoulli(like: torch.Tensor, p: float = 0.5, generator: None = None) -> torch.Tensor:
    # Not drawn in place: the result is a new tensor, always contiguous.
    return torch.empty(like.shape, dtype=like.dtype, device=like.device).bernoulli_(p)


def _randint_like(like: torch.Tensor, *numbers: Any, **options: Any) -> torch.Tensor:
    # Python's binding bypasses autograd; the operator has no derivative.
    return torch.randint_like(like.detach(), *numbers, **options)


BY_HAND: dict[Any, Callable[..., torch.Tensor]] = {
    aten.bernoulli.p: _bernoulli,
    **{getattr(aten.randint_like, name): _randint_like for name in aten.randint_like.overloads() if "out" not in name},
}
"""Replacements for draws of the flat graph whose operator by itself would not do what eager mode did."""
