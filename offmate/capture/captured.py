"""A captured forward: one flat graph, whose nodes keep the modes under which they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from . import batch_decisions
from .byproducts import ByProduct


@dataclass(frozen=True)
class Region:
    """The modes under which a node runs: grad mode and, inside the model's own autocast regions, that region.

    autocast: (device type, dtype, enabled, cache enabled); None outside the model's own regions.
    instance: number of the outermost autocast region; blocks that differ only in it are alike.
    """

    grad: bool = True
    autocast: tuple[str, torch.dtype | None, bool, bool | None] | None = None
    instance: int = field(default=0, repr=False, compare=False)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run the body under these modes."""
        with contextlib.ExitStack() as stack:
            if not self.grad:
                stack.enter_context(torch.no_grad())
            if self.autocast is not None:
                kind, dtype, enabled, cache = self.autocast
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield


@dataclass(frozen=True)
class Captured:
    """A model's forward as one flat graph of ATen operators, not yet functional.

    Parameters
    ----------
    graph: placeholders, call_function nodes with `meta["region"]`, one output node.
    params: placeholder name -> canonical parameter name (a tied weight is one placeholder).
    buffers: placeholder name -> canonical buffer name.
    constants: placeholder name -> tensor lifted by export.
    inputs: per leaf of the flattened (args, kwargs): placeholder name, or None for a leaf that is not a tensor.
    outputs: per leaf of the flattened output: node name, or the constant itself wrapped in a 1-tuple.
    output_names: readable path of every output leaf, such as "loss".
    out_spec: how to rebuild the output.
    taken: decisions that were fixed during export (rule 1).
    by_products: by-products of the forward; their tensors are the last leaves of the outputs.
    read: attributes of modules that the forward read, by path. free: those that it sets itself, so that their values
        before a call do not matter. changed: numbers among them, as (holder, name, value that the forward leaves).
    """

    graph: fx.Graph
    params: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: tuple[str | None, ...]
    outputs: tuple[str | tuple[Any], ...]
    output_names: tuple[str, ...]
    out_spec: Any
    taken: tuple[batch_decisions.Decision, ...] = ()
    by_products: tuple[ByProduct, ...] = ()
    read: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    changed: tuple[tuple[Any, Any, Any], ...] = ()

    @property
    def n_results(self) -> int:
        """The number of leaves of the outputs that belong to the model's result."""
        return len(self.outputs) - sum(by_product.n_tensors for by_product in self.by_products)

    @property
    def reads(self) -> frozenset[str]:
        """The names of the parameters that the forward reads."""
        return frozenset(self.params[node.name] for node in self.graph.nodes if node.name in self.params and node.users)

    def trains(self, output: str) -> frozenset[str]:
        """Return the names of the parameters that get a gradient through an output."""
        found, waiting = set(), [next(node for node in self.graph.nodes if node.name == output)]
        while waiting:
            node = waiting.pop()
            cut = node.op == "call_function" and (
                not node.meta["region"].grad or node.target is torch.ops.aten.detach.default
            )
            if node in found or cut:
                continue
            found.add(node)
            waiting += node.all_input_nodes
        return frozenset(self.params[node.name] for node in found if node.name in self.params)
