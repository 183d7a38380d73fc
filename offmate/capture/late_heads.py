"""Parts the head of a language model in two, so that its weight may leave before the gradient of the weight is made.

The backward of a head has two products: with the weight, for the gradient of its input; and with its input, for the
gradient of the weight. In one block the weight, its gradient and the logits' gradient would be on the device at once.
So the second product becomes the backward of a node of its own, which hands on nothing but a tensor without memory: the
gradient of that tensor is the logits' gradient.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ..runtime.operators.losses import tiled_cross_entropy
from .effects import base_of
from .losses import autocasts

_LIBRARY = torch.library.Library("offmate", "FRAGMENT")
_LIBRARY.define("weight_later(Tensor input, Tensor weight) -> Tensor")
_LIBRARY.define("linear_before(Tensor input, Tensor weight, Tensor later) -> Tensor")

weight_later = torch.ops.offmate.weight_later.default
"""weight_later(input, weight): zeros like the result, in the memory of one; their gradient makes the weight's."""
linear_before = torch.ops.offmate.linear_before.default
"""linear_before(input, weight, later): the result; its gradient goes to `input` and `later`, not to the weight."""

_LINEAR = torch.ops.aten.linear.default


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        return given.new_zeros(()).expand(*given.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        given, weight = ctx.saved_tensors
        with torch.enable_grad():
            leaf = weight.detach().requires_grad_()
            product = torch.nn.functional.linear(given.detach(), leaf)
        # Nothing reads the product itself, so the trace drops it.
        return None, torch.autograd.grad(product, leaf, grad)[0]


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad


def _linear_before(given: torch.Tensor, weight: torch.Tensor, later: torch.Tensor) -> Any:
    return _Attached.apply(torch.nn.functional.linear(given, weight.detach()), later)


BY_HAND: dict[Any, Any] = {weight_later: _Later.apply, linear_before: _linear_before}
"""What autograd sees of the two nodes."""


def part_heads(graph: fx.Graph, trainable: Collection[str]) -> None:
    """Part the linear layers of a flat graph whose results a loss takes in tiles.

    Parameters
    ----------
    trainable: placeholder names of the parameters that require a gradient.
    """
    for node in list(graph.nodes):
        if node.target is tiled_cross_entropy:
            head = base_of(node.args[0])
            if _can_be_parted(head, trainable):
                _part(graph, head)


def _can_be_parted(head: fx.Node, trainable: Collection[str]) -> bool:
    """Return whether a node is a linear layer whose weight gets its gradient at the same place in the order of sums."""
    if head.target is not _LINEAR or len(head.args) != 2 or head.kwargs or not head.meta["region"].grad:
        return False
    given, weight = head.args
    assert isinstance(given, fx.Node) and isinstance(weight, fx.Node)
    # How a layer with another layout of its input is computed depends on who gets a gradient.
    plain = weight.name in trainable and given.op == "call_function" and given.meta["val"].is_contiguous()
    if not plain or autocasts(head) or given.meta["val"].dtype != weight.meta["val"].dtype:
        return False
    nodes = list(head.graph.nodes)
    between = nodes[nodes.index(given) + 1 : nodes.index(head)]
    return not any(base_of(read) is weight for node in between for read in node.all_input_nodes)


def _part(graph: fx.Graph, head: fx.Node) -> None:
    given, weight = head.args
    assert isinstance(given, fx.Node)
    with graph.inserting_after(given):
        later = graph.call_function(weight_later, (given, weight))
    later.meta |= head.meta
    head.target, head.args = linear_before, (given, weight, later)
