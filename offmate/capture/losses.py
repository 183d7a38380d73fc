"""Cross entropies over large logits in tiles of rows, with the same bits and without the logits in full precision."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from ..guards.surroundings import inside_autocast
from ..runtime.operators.losses import (
    rows_of_tile,
    tiled_cross_entropy,
    tiled_cross_entropy_backward,
    tiled_cross_entropy_backward_,
)
from ..runtime.torch_names.autograd import without_autocast
from ..runtime.torch_names.operators import unsafe_view
from .effects import base_of, writes
from .spec import storages_of

log = logging.getLogger("offmate")

_CROSS_ENTROPY = torch.ops.aten.cross_entropy_loss.default
_CAST = torch.ops.aten.to.dtype
_MOVES = (  # what only moves elements, so that a cast before it may as well come after it
    torch.ops.aten.view.default, torch.ops.aten.reshape.default, unsafe_view,
    torch.ops.aten.slice.Tensor, torch.ops.aten.contiguous.default, torch.ops.aten.flatten.using_ints,
)  # fmt: skip
_MAKERS = (  # what makes logits in memory of their own
    torch.ops.aten.linear.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default,
    torch.ops.aten.matmul.default, torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor, torch.ops.aten.add.Tensor,
)  # fmt: skip
_WORTH = 2  # tiles that logits must have, or there is little to save
_IGNORED = -100


def tile_losses(graph: fx.Graph, device: torch.device) -> None:
    """Replace the cross entropies of a flat graph whose logits are large by those in tiles.

    A cast of the logits to full precision moves into the tiles. It stays, with the loss as it is, if anything else
    reads the result, or if a trial on the device finds other bits.

    Parameters
    ----------
    device: where the model will run.
    """
    for node in list(graph.nodes):
        if node.target is _CROSS_ENTROPY and _fits(node):
            _tile(graph, node, device)


def loss_logits(nodes: Iterable[fx.Node]) -> tuple[int, ...] | None:
    """Return the sizes of the logits whose cross entropy a block's forward takes; None if it takes none."""
    for node in nodes:
        if node.target in (tiled_cross_entropy, _CROSS_ENTROPY, torch.ops.aten.nll_loss_forward.default):
            return tuple(int(size) for size in _given(node, 0).meta["val"].shape)
    return None


def overwrite_logits(graph: fx.Graph, resting: Collection[fx.Node]) -> None:
    """Let a traced block's loss in tiles write the gradient over its logits, where no other backward reads them.

    Parameters
    ----------
    resting: nodes whose values exist before the block, or outlive it.
    """
    kept = {storage for node in resting for storage in storages_of(node)}
    forward = _reached(resting, lambda node: node.all_input_nodes)
    for node in graph.nodes:
        if node.target is not tiled_cross_entropy_backward:
            continue
        (own,) = storages_of(_given(node, 1))
        readers = {user for one in graph.nodes if own in storages_of(one) for user in one.users}
        others = [user for user in readers - {node} if set(storages_of(user)) != {own} and not _ends(user, forward)]
        if own not in kept and [user.target for user in others] == [tiled_cross_entropy]:
            node.target = tiled_cross_entropy_backward_
            (gradient,), logits = storages_of(node), _given(node, 1).meta["val"]
            with logits.fake_mode:
                for one in [one for one in graph.nodes if storages_of(one) == (gradient,)]:
                    value = one.meta["val"]
                    one.meta["val"] = logits.as_strided(value.shape, value.stride(), value.storage_offset())


def _reached(nodes: Iterable[fx.Node], further: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return these nodes, and all that are reached from them step by step."""
    found, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += further(node)
    return found


def _ends(node: fx.Node, forward: Collection[fx.Node]) -> bool:
    """Return whether a node and all that depends on it are of the forward, which has run when logits are overwritten.

    The loss itself is not: its backward needs what its forward has picked.
    """
    return all(one.op == "output" or one in forward for one in _reached([node], lambda reached: reached.users))


def overwritten(
    graph: fx.Graph,
    storages: Callable[[fx.Node], Collection[int]],
    kept: Collection[int],
    differentiable: Callable[[fx.Node], bool],
) -> set[int]:
    """Return the storages of logits that a flat graph's losses in tiles may overwrite.

    Parameters
    ----------
    storages: those behind a node's value. kept: storages of inputs and outputs.
    differentiable: whether a node's value requires a gradient; what does not is made by the forward alone.
    """
    found: set[int] = set()
    for node in graph.nodes:
        if node.target is tiled_cross_entropy:
            (own,) = storages(_given(node, 0))
            # An output that was left out is still an argument of the graph's output node.
            readers = {u for one in graph.nodes if own in storages(one) for u in one.users if u.op != "output"}
            others = [user for user in readers - {node} if set(storages(user)) != {own}]
            alone = not any(map(differentiable, others))
            found |= {own} if alone and own not in kept else set()
    return found


def _given(node: fx.Node, index: int) -> fx.Node:
    """Return an argument that is a node."""
    argument: Any = node.args[index]
    assert isinstance(argument, fx.Node), node.format_node()
    return argument


def _fits(node: fx.Node) -> bool:
    """Return whether a cross entropy is of the plain kind: a class per row, no weights, no smoothing."""
    logits, target, weight, _, _, smoothing = _arguments(node)
    value, classes = logits.meta.get("val"), target.meta.get("val")
    if not (isinstance(value, torch.Tensor) and isinstance(classes, torch.Tensor)):
        return False
    plain = weight is None and smoothing == 0 and value.dim() == 2 and classes.dim() == 1 and value.is_contiguous()
    large = plain and value.shape[0] >= _WORTH * rows_of_tile(value.shape[1])
    # Autocast would cast lower precision for the loss by itself.
    return large and (value.dtype == torch.float32 or not autocasts(node)) and classes.dtype == torch.int64


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    defaults = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
    given = dict(zip(("self", "target", *defaults), node.args)) | node.kwargs
    return given["self"], given["target"], *({**defaults, **given}[name] for name in defaults)


def autocasts(node: fx.Node) -> bool:
    """Return whether a node of a flat graph runs under autocast."""
    region = node.meta["region"].autocast
    return inside_autocast() if region is None else bool(region[2])


def _tile(graph: fx.Graph, node: fx.Node, device: torch.device) -> None:
    logits, target, _, reduction, ignore_index, _ = _arguments(node)
    full = logits.meta["val"]
    cast, moves = _cast_before(logits, node.meta["region"])
    source = _given(cast, 0) if cast is not None else logits
    given = source.meta["val"].dtype
    if _may_be_written(graph, source):
        return
    if not _same_bits(given, full.dtype, full.shape[1], reduction, device):
        log.info("the loss is not split into tiles: on %s, tiles would give other bits", device)
        return
    if cast is not None:
        for move, moved in zip(moves, _moved(moves, source)):
            with move.meta["val"].fake_mode:
                move.meta["val"] = torch.empty_strided(
                    moved.shape, moved.stride(), dtype=given, device=move.meta["val"].device
                )
        cast.replace_all_uses_with(source)
        graph.erase_node(cast)
    rows = logits if moves else source
    with graph.inserting_before(node):
        tiled = graph.call_function(tiled_cross_entropy, (rows, target, reduction, ignore_index, full.dtype))
        loss = graph.call_function(operator.getitem, (tiled, 0))
    for new in (tiled, loss):
        new.meta |= {"region": node.meta["region"], "val": node.meta["val"]}
    node.replace_all_uses_with(loss)
    graph.erase_node(node)


def _may_be_written(graph: fx.Graph, logits: fx.Node) -> bool:
    """Return whether the model may write into logits: tiles read them later than the whole does, and again backward.

    Schemas do not tell of every alias, so any write counts that comes after the operator that makes them.
    """
    made, nodes = base_of(logits), list(graph.nodes)
    since = nodes.index(made) if made.target in _MAKERS else 0
    return any(writes(node) for node in nodes[since:])


def _cast_before(logits: fx.Node, region: Any) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return the cast of the logits, if only the loss reads its result, and what merely moves elements after it."""
    moves, node = [], logits
    while node.target in _MOVES and len(node.users) == 1 and node.meta["region"] == region:
        moves.append(node)
        node = _given(node, 0)
    alone = node.target is _CAST and len(node.users) == 1 and node.meta["region"] == region
    if not alone or not _given(node, 0).meta["val"].is_floating_point():
        return None, []
    moves.reverse()
    # A cast makes what has gaps dense, and only then can some of it be viewed.
    moved = _moved(moves, _given(node, 0))
    fits = len(moved) == len(moves) and all(one.is_contiguous() for one in moved[-1:])
    return (node, moves) if fits and (moves or _given(node, 0).meta["val"].is_contiguous()) else (None, [])


def _moved(moves: list[fx.Node], source: fx.Node) -> list[torch.Tensor]:
    """Return what the moves would give of the source itself, without data, up to the first that is impossible."""
    value, found = source.meta["val"], []
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    for move in moves:
        target: Any = move.target
        try:
            like = target(like, *move.args[1:], **move.kwargs)
        except (RuntimeError, ValueError):
            break
        found.append(like)
    return found


@lru_cache(maxsize=64)
def _same_bits(given: torch.dtype, full: torch.dtype, classes: int, reduction: int, device: torch.device) -> bool:
    """Return whether tiles give the bits of the whole, on two tiles of which one is not full; true for another machine.

    Parameters
    ----------
    given, full: dtypes of the logits and of the loss.
    """
    if device.type != "cpu" and not _is_here(device):
        return True
    rows, generator = rows_of_tile(classes) + 3, torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad(), without_autocast():
        logits = (3 * torch.randn(rows, classes, generator=generator, device="cpu")).to(device, given)
        target = torch.randint(0, classes, (rows,), generator=generator, device="cpu").to(device)
        target[::5] = _IGNORED
        whole, tiled = logits.requires_grad_(), logits.detach().clone().requires_grad_()
        losses = (
            _CROSS_ENTROPY(whole.to(full), target, None, reduction, _IGNORED),
            tiled_cross_entropy(tiled, target, reduction, _IGNORED, full)[0],
        )
        gradient = torch.rand(losses[0].shape, generator=generator, device="cpu").to(device, full)
        for loss in losses:
            loss.backward(gradient)
    return torch.equal(*losses) and torch.equal(whole.grad, tiled.grad)  # type: ignore[arg-type]


def _is_here(device: torch.device) -> bool:
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device.type
