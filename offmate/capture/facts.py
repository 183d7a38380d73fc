"""Facts about every node of a flat graph, found by running it on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.operators import schema_of
from ..runtime.torch_names.tensors import storage_key
from ..runtime.torch_names.tracing import FakeTensorMode
from .casts import Casts
from .effects import writes
from .export import Captured
from .functions import as_eager


@dataclass(frozen=True)
class Facts:
    """Facts about a node's value, found by running the graph on fake tensors.

    Parameters
    ----------
    value: fake tensor, or a tuple of them.
    storages: identity of the storage behind each tensor of the value.
    requires_grad: whether each tensor of the value requires a gradient.
    written: storages that the node writes into.
    """

    value: Any
    storages: tuple[int, ...]
    requires_grad: tuple[bool, ...]
    written: tuple[int, ...] = ()


@dataclass(frozen=True)
class Findings:
    """What running a flat graph shows.

    Parameters
    ----------
    facts: per node of the flat graph.
    rounded: trained parameters whose gradients add up in a lower precision -> that precision (see `Casts`).
    cast: frozen parameters that come to the device in the lower precision to which every use casts them.
    """

    facts: dict[fx.Node, Facts]
    rounded: dict[fx.Node, torch.dtype]
    cast: dict[fx.Node, torch.dtype]


def find(captured: Captured, trainable: frozenset[str], may_cast: frozenset[str]) -> Findings:
    """Run the flat graph on fake tensors with autograd on; once more if parameters can come cast.

    Parameters
    ----------
    trainable: placeholder names of the parameters that require a gradient.
    may_cast: placeholder names of frozen parameters that the host may cast, if every use does so.
    """
    facts, casts = _run(captured, trainable, {})
    rounded = casts.rounded(captured.graph, trainable)
    cast = {node: dtype for node, dtype in casts.always(captured.graph).items() if node.name in may_cast}
    if cast:
        found, _ = _run(captured, trainable, cast)
        # An operator may look at the precision of what it is given, besides casting it.
        if all(_alike(facts[node].value, found[node].value) for node in facts if node not in cast):
            return Findings(found, rounded, cast)
    return Findings(facts, rounded, {})


def _alike(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(
        (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) if isinstance(a, torch.Tensor) else a == b
        for a, b in pairs
    )


def _run(
    captured: Captured, trainable: frozenset[str], cast: Mapping[fx.Node, torch.dtype]
) -> tuple[dict[fx.Node, Facts], Casts]:
    """Note storages and gradients of every node, and the casts of parameters; those in `cast` come cast."""
    mode, casts = FakeTensorMode(), Casts()
    env: dict[fx.Node, Any] = {}
    facts: dict[fx.Node, Facts] = {}
    for node in captured.graph.nodes:
        if node.op == "output":
            continue
        written: tuple[int, ...] = ()
        if node.op == "placeholder":
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                dtype = cast.get(node, value.dtype)
                with mode:
                    value = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)
                if node.name in trainable:
                    value.requires_grad_()
                if node.name in captured.params:
                    casts.knows(node, value)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            # Autograd forbids writing into a leaf; where eager mode allows it, the region is under no_grad.
            with mode, node.meta["region"].entered(), casts.of(node):
                value = as_eager(node.target)(*args, **kwargs)
            if writes(node):
                written = _written(node, args, kwargs)
        env[node] = value
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
        facts[node] = Facts(
            value,
            tuple(storage_key(t.untyped_storage()) for t in tensors),
            (),
            written,
        )
    # Read at the end, since a write through a view makes its base require a gradient later.
    facts = {n: replace(f, requires_grad=_require_grad(f.value)) for n, f in facts.items()}
    return facts, casts


def _require_grad(value: Any) -> tuple[bool, ...]:
    return tuple(t.requires_grad for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


def _written(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    written = []
    for index, argument in enumerate(schema_of(node.target).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        written += [storage_key(t.untyped_storage()) for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return tuple(written)
