"""Removes nodes without effect from a flat graph: assertions, no-op casts, operators that return their argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..runtime.torch_names.operators import ASSERTIONS, OpOverload, is_composite
from .data_dependent import check_sizes
from .effects import base_of, has_effect, updates_stats, writes, written_into
from .not_exported import check_dense_tensors

_COPY = torch.ops.aten.copy_.default


def tidy(graph: fx.Graph) -> None:
    """Drop assertions, operators that return their argument, and dead code (random and writing operators stay).

    Readers of an operator that returns the buffer it writes then read the buffer.

    Raises: CaptureError if a size, or a number that is needed, depends on values, or if a tensor is not dense.
    """
    for node in list(graph.nodes):
        if str(node.target).startswith(ASSERTIONS):
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    check_sizes(graph)
    check_dense_tensors(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = str(node.target)
        if _is_noop_cast(node) if name.startswith("aten.to.") else _returns_its_argument(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif (target := written_into(node)) is not None and base_of(target).op == "placeholder":
            # Readers of the write's result then read the buffer, which every block can reach.
            node.replace_all_uses_with(target)
            if node.target is _COPY and node.args[0] is node.args[1]:
                # `self.n += 1` sets the buffer to itself, which writes nothing in eager mode.
                graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=has_effect)


def _is_noop_cast(node: fx.Node) -> bool:
    """Return whether a cast changes nothing, so that `to` returns its argument itself, as in eager mode."""
    source, value = node.args[0], node.meta.get("val")
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    copies = node.kwargs.get("copy", False) or any(a is True for a in node.args[2:])
    return (
        isinstance(before, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and not copies
        and (before.dtype, before.device, before.layout) == (value.dtype, value.device, value.layout)
    )


def _returns_its_argument(node: fx.Node) -> bool:
    """Return whether eager mode returns the argument itself, as `flatten(1)` of a matrix does."""
    source = node.args[0] if node.args else None
    before, value = (n.meta.get("val") if isinstance(n, fx.Node) else None for n in (source, node))
    if not (isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor) and node.all_input_nodes == [source]):
        return False
    target: Any = node.target
    composite = isinstance(target, OpOverload) and is_composite(target)
    alike = (before.shape, before.stride(), before.dtype) == (value.shape, value.stride(), value.dtype)
    if not composite or not alike or writes(node) or updates_stats(node):
        return False
    like = torch.empty_strided(before.shape, before.stride(), dtype=before.dtype, device="meta")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: like)
    try:
        return target(*args, **kwargs) is like
    except (RuntimeError, NotImplementedError):
        return False  # It needs values or its device, so it computes.
