"""What operators are counted as, where no seconds are measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from offmate.profile.analytic import flops

SAMPLES, TOKENS, WIDTH = 2, 32, 16
PRODUCTS = 2  # of attention: queries by keys, and weights by values


def counted(operator: Any, tensors: list[torch.Tensor], *more: Any) -> int:
    graph = fx.Graph()
    given = [graph.placeholder(f"t{i}") for i in range(len(tensors))]
    for node, tensor in zip(given, tensors):
        node.meta["val"] = tensor
    node = graph.call_function(operator, (*given, *more))
    node.meta["val"] = tensors[0]
    return flops(node)


def heads(number: int) -> torch.Tensor:
    return torch.empty(SAMPLES, number, TOKENS, WIDTH, device="meta", dtype=torch.bfloat16)


@pytest.mark.parametrize("operator, more", [
    (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, ()),
    (torch.ops.aten._scaled_dot_product_cudnn_attention.default, (None, True)),
    (torch.ops.aten._scaled_dot_product_flash_attention.default, ()),
    (torch.ops.aten._scaled_dot_product_efficient_attention.default, (None, True)),
])  # fmt: skip
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_attention_with_grouped_heads_counts_as_much_as_without(operator: Any, more: Any, groups: int) -> None:
    queries, keys = heads(8), heads(8 // groups)
    expected = PRODUCTS * 2 * SAMPLES * 8 * TOKENS * TOKENS * WIDTH
    assert counted(operator, [queries, keys, keys], *more) == expected


@pytest.mark.parametrize("groups", [4, 1])
def test_the_backward_of_grouped_attention_counts_as_much_as_without(groups: int) -> None:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    queries, keys = heads(8), heads(8 // groups)
    once = counted(backward, [queries, queries, queries, queries, queries, queries], 0.0, False)
    assert counted(backward, [queries, queries, keys, keys, queries, queries], 0.0, False) == once > 0
