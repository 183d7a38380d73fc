"""The storages of a traced block: results and gradients get their own, and its backward reads results as they rest."""

from __future__ import annotations

import torch
from torch import fx

from ..runtime.layouts import as_layout
from .spec import BlockSpec, dense_stride, gapped_stride, storages_of

_VIEW = torch.ops.aten.as_strided.default


def own_storages(graph: fx.Graph, before: fx.Node, nodes: list[fx.Node], placeholders: list[fx.Node]) -> list[fx.Node]:
    """Copy results that are views of the block's inputs or of conjugates, so that their own storage holds them."""
    given = {s for p in placeholders for s in storages_of(p)}
    owned = []
    for node in nodes:
        if set(storages_of(node)) & given or _unresolved(node.meta["val"]):
            node = _copy_before(graph, before, node, node.meta["val"].stride())
        owned.append(node)
    return owned


def settle_gradients(
    graph: fx.Graph,
    before: fx.Node,
    spec: BlockSpec,
    grads: list[fx.Node | None],
    placeholders: list[fx.Node],
    results: list[fx.Node],
) -> None:
    """Give every gradient its own storage, and a parameter's complete gradient the parameter's layout.

    A value's gradient that is made in one block keeps its repeats and gaps.
    """
    taken = {s for p in [*placeholders, *results] for s in storages_of(p)}
    for index, node in enumerate(grads):
        external = spec.externals[index]
        if node is None:
            continue
        value = node.meta["val"]
        like = external.node.meta["fake"]
        exact = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        alone = external.kind == "value" and external.final and external.accumulates is None
        # Sums that read it round in an order that depends on its strides, also on those of repeats and gaps.
        stride = gapped_stride(value) if alone else dense_stride(value)
        settled = exact and not (set(storages_of(node)) & taken) and not _unresolved(value)
        if external.kind == "param" and external.final:
            settled = settled and value.stride() == like.stride()
            stride = dense_stride(like)
        if not settled:
            grads[index] = node = _copy_before(graph, before, node, stride)
        taken |= set(storages_of(node))


def _copy_before(graph: fx.Graph, before: fx.Node, node: fx.Node, stride: tuple[int, ...]) -> fx.Node:
    value = node.meta["val"]
    with graph.inserting_before(before):
        copy = graph.call_function(as_layout, (node, list(value.shape), list(stride)))
    with value.fake_mode:
        copy.meta["val"] = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
    return copy


def let_backward_read(
    graph: fx.Graph, results: list[fx.Node], writes: dict[int, fx.Node], forward: dict[fx.Node, None]
) -> None:
    """Let the backward read a value, of which the block's result is a view, as a view of that result.

    The result is all that is there of its storage when the backward starts: the operator that made it would run again,
    although its other results may be saved. A result that is only a part of its storage, or that reads it as another
    dtype, becomes a copy of its own.

    Parameters
    ----------
    results, writes: what the block hands over; copies are put into them. forward: the nodes that its forward runs.
    """
    for source in forward:
        readers = [n for n in source.users if n.op == "call_function" and n not in forward]
        while readers and (result := _made_again_for(source, [*results, *writes.values()])) is not None:
            value, wanted = result.meta["val"], source.meta["val"]
            if _fills_its_storage(value) and value.dtype == wanted.dtype:
                with graph.inserting_after(result):
                    layout = (list(wanted.shape), list(wanted.stride()), wanted.storage_offset())
                    view = graph.call_function(_VIEW, (result, *layout))
                with value.fake_mode:
                    view.meta["val"] = value.as_strided(*layout)
                for reader in readers:
                    reader.replace_input_with(source, view)
                _put_readers_after(graph, view)
                break
            copy = _copy_before(graph, result.next, result, value.stride())
            results[:] = [copy if r is result else r for r in results]
            writes.update({index: copy for index, r in writes.items() if r is result})


def _put_readers_after(graph: fx.Graph, value: fx.Node) -> None:
    """Move what reads a value, and what reads that in turn, behind it; the order stays as it was otherwise."""
    before = list(graph.nodes)[: list(graph.nodes).index(value)]
    moved, last = {value}, value
    for node in before:
        if moved.intersection(node.all_input_nodes):
            last.append(node)
            moved.add(node)
            last = node


def _made_again_for(source: fx.Node, handed: list[fx.Node]) -> fx.Node | None:
    """Return the result whose storage an operator would make again to give `source`; None if it can be had as it is."""
    own = set(storages_of(source)) if isinstance(source.meta.get("val"), torch.Tensor) else set()
    result = next((n for n in handed if own & set(storages_of(n))), None)
    node: fx.Node | None = source
    while result is not None and node is not None and node not in handed:
        node = next((n for n in node.all_input_nodes if own & set(storages_of(n))), None)
    return result if node is None else None


def _unresolved(value: torch.Tensor) -> bool:
    """Return whether a value is the conjugate or the negative of what its storage holds: a replay moves storages."""
    return value.is_conj() or value.is_neg()


def _fills_its_storage(value: torch.Tensor) -> bool:
    size_bytes = value.numel() * value.element_size()
    return value.untyped_storage().nbytes() == size_bytes and dense_stride(value) == value.stride()
