"""Specifications of blocks, the graphs that tracing makes of them, and the key that tells their class."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import fx

from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.tensors import storage_key

_ALIGNED = 16  # elements; kernels read up to so many at once, and strides keep their remainder by it


@dataclass(frozen=True)
class LowPrecision:
    """The lower precision to which autocast casts a parameter, and what moves in it.

    Parameters
    ----------
    copied: whether a copy of the parameter comes to the device in it. gradient: whether the gradient leaves in it.
    """

    dtype: torch.dtype
    copied: bool
    gradient: bool = True


@dataclass(frozen=True)
class External:
    """A value that a block reads and did not make.

    Parameters
    ----------
    node: the node of the flat graph.
    kind: "param", "buffer", "shared" or "value".
    leaves: how many leaves it enters as: one per use where rule 3 asks for it, else 1.
    differentiable: whether a gradient with respect to it is wanted.
    accumulates: strides of the gradient that a later block (or the user) has left and to which this block adds its own;
        None if there is no such gradient.
    final: whether this block adds the last part of the gradient (a parameter's gradient then takes its layout).
    rounded: the lower precision in which eager mode adds up its parts, None if it does not round.
    changes: whether some block's forward writes into its memory, so that a backward would find other values there.
    low: of a parameter that autocast casts anyway; None if it and its gradient move in its own precision.
    """

    node: fx.Node
    kind: str
    leaves: int = 1
    differentiable: bool = False
    accumulates: tuple[int, ...] | None = None
    final: bool = True
    rounded: torch.dtype | None = None
    changes: bool = False
    low: LowPrecision | None = None


@dataclass(frozen=True)
class BlockSpec:
    """The inputs, operators and results of a block, in terms of the flat graph.

    Parameters
    ----------
    nodes: in program order; views of resting tensors that cross a cut are repeated here.
    externals: in order of first use.
    results: nodes handed on to later blocks or to the user.
    tangents: those results that get a gradient, by index into `results`, with the gradient's strides.
    """

    nodes: tuple[fx.Node, ...]
    externals: tuple[External, ...]
    results: tuple[fx.Node, ...]
    tangents: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Joint:
    """A block class's traced graph.

    Parameters
    ----------
    graph: functional ATen graph; every node's `meta["val"]` is its fake value.
    leaves: per external the placeholders as which it enters.
    tangents: placeholder per tangent. accumulators: per external its accumulator's placeholder or None.
    results: node per result of the block. grads: per external the node of its gradient or None.
    gradient_parts: per external, how many gradients autograd adds up in this block.
    writes: external index of a buffer -> node with its new value. changing: indices of externals that a block writes.
    forward: nodes that the forward runs, in order. backward: the rest.
    """

    graph: fx.Graph
    leaves: tuple[tuple[fx.Node, ...], ...]
    tangents: tuple[fx.Node, ...]
    accumulators: tuple[fx.Node | None, ...]
    results: tuple[fx.Node, ...]
    grads: tuple[fx.Node | None, ...]
    gradient_parts: tuple[int, ...]
    writes: dict[int, fx.Node]
    changing: frozenset[int]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]


def class_key(spec: BlockSpec) -> str:
    """Hash the block's canonical form: two blocks with the same key are one class.

    Nodes are numbered in program order and externals by first use, so names do not count. Shapes, dtypes, strides,
    constants, grad modes, autocast regions and the sharing of storages do.
    """
    number: dict[fx.Node, str] = {e.node: f"e{i}" for i, e in enumerate(spec.externals)}
    number |= {n: f"n{i}" for i, n in enumerate(spec.nodes)}
    storages: dict[int, int] = {}
    lines = []
    for external in spec.externals:
        marks = (
            external.kind, external.leaves, external.differentiable, external.accumulates, external.final,
            external.rounded, external.changes,
            *((external.low,) if external.low is not None else ()),
        )  # fmt: skip
        lines.append(f"{marks} {_signature(external.node, storages)}")
    for node in spec.nodes:
        args = fx.map_arg((node.args, node.kwargs), lambda n: number[n])
        lines.append(f"{node.target} {args} {node.meta['region']} {_signature(node, storages)}")
    lines.append(f"{[number[n] for n in spec.results]} {spec.tangents}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _signature(node: fx.Node, storages: dict[int, int]) -> str:
    parts = []
    for tensor in pytree.tree_leaves(node.meta["fake"]):
        if isinstance(tensor, torch.Tensor):
            storage = storages.setdefault(storage_key(tensor.untyped_storage()), len(storages))
            layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
            parts.append(f"{layout} {tensor.requires_grad} s{storage}")
        else:
            parts.append(repr(tensor))
    return ";".join(parts)


def storages_of(node: fx.Node) -> tuple[int, ...]:
    """Return the identities of the storages behind a traced node's value."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return tuple(storage_key(value.untyped_storage()) for value in values if isinstance(value, torch.Tensor))


def dense_stride(like: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a dense tensor that is laid out like `like`: its own strides if it is dense."""
    return torch.empty_like(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")).stride()


def span_bytes(like: torch.Tensor, stride: tuple[int, ...]) -> int:
    """Return the bytes of the memory behind a tensor of the same shape and dtype with these strides."""
    if not like.numel():
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(like.shape, stride))) * like.element_size()


def gapped_stride(like: torch.Tensor) -> tuple[int, ...]:
    """Return strides with gaps and repeats where those of `like` have them, the gaps as small as kernels may read.

    A part of a larger tensor, and one that repeats its elements, are added up in another order than a dense tensor.
    """
    stride = [0] * like.dim()
    expected = wanted = 1
    for dim in sorted(range(like.dim()), key=lambda dim: (like.stride(dim), like.shape[dim])):
        size, step = like.shape[dim], like.stride(dim)
        if step == 0 and size > 1:
            continue
        if size > 1 and step < expected:
            return dense_stride(like)  # elements that overlap otherwise
        if size > 1 and step > expected:
            loose = wanted + 1 + (step - wanted - 1) % _ALIGNED
            wanted = min(step, loose) if wanted == expected else loose
        stride[dim] = wanted
        expected, wanted = (step * size, wanted * size) if size > 1 else (expected, wanted)
    return tuple(stride)
