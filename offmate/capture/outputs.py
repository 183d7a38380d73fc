"""A flat graph's outputs: the nodes that make them, their names, and which are kept without a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import OutputKind

from ..errors import CaptureError
from ..runtime.torch_names import trees as pytree
from .byproducts import Look
from .effects import base_of, writes
from .observe import Observer


def outputs_of(program: Any, graph: fx.Graph) -> tuple[str | tuple[Any], ...]:
    """Return per leaf of the model's output the node that makes it; export lists written buffers first."""
    returned = next(n for n in graph.nodes if n.op == "output").args[0]
    leaves: list[str | tuple[Any]] = []
    for spec, value in zip(program.graph_signature.output_specs, returned):
        if spec.kind == OutputKind.USER_OUTPUT:
            leaves.append(value.name if isinstance(value, fx.Node) else (value,))
        elif spec.kind != OutputKind.BUFFER_MUTATION:
            raise CaptureError(f"the model has an output of kind {spec.kind.name}, which cannot be replayed")
    return tuple(leaves)


def as_kept(graph: fx.Graph, outputs: tuple[Any, ...], observed: Observer) -> tuple[Any, ...]:
    """Return the outputs, in which hooks and attributes keep the model's own tensors instead of copies.

    The gradient of a copy would be added to the tensor's gradient in another order. Tensors that the forward writes
    into later remain copies.
    """
    written = {base_of(node.args[0]) for node in graph.nodes if writes(node) and node.args}
    nodes = {node.name: node for node in graph.nodes}
    copies = [1 + isinstance(b.use, Look) for b, tensors in observed.by_products for _ in tensors]
    first = len(outputs) - len(copies)
    kept: list[Any] = list(outputs[:first])
    for output, count in zip(outputs[first:], copies, strict=True):
        node = nodes[output] if isinstance(output, str) else None
        for _ in range(count):
            copied = node is not None and node.target is torch.ops.aten.clone.default
            node = node.args[0] if copied and node is not None and isinstance(node.args[0], fx.Node) else None
        shared = node is not None and node.op == "call_function" and base_of(node) not in written
        kept.append(node.name if shared and node is not None else output)
    return tuple(kept)


def output_names(program: Any, observed: Observer) -> tuple[str, ...]:
    spec = program.call_spec.out_spec
    result = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)[0]
    # Every leaf is its own position; those of by-products come after the result's.
    found = {leaf: ".".join(path) or "output" for path, leaf in _paths(result)}
    return (
        *(found[leaf] for leaf in sorted(found)),
        *(by_product.name for by_product, tensors in observed.by_products for _ in tensors),
    )


def _paths(result: Any) -> list[tuple[tuple[str, ...], int]]:
    """Return the path to every leaf of an output; by position in a class that torch knows without paths."""
    try:
        leaves, _ = pytree.tree_flatten_with_path(result)
        names = ("key", "idx", "name")
        return [
            (tuple(str(next((getattr(k, n) for n in names if hasattr(k, n)), k)) for k in p), at) for p, at in leaves
        ]
    except ValueError:
        # diffusers registers its outputs, which are dictionaries, without paths.
        items = result.items() if isinstance(result, dict) else enumerate(pytree.tree_leaves(result))
        return [((str(name), *path), leaf) for name, value in items for path, leaf in _paths(value)]
