"""Cuts the flat graph into a chain of blocks: finds what depends on parameters, and cuts where the chain is narrow."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError
from ..guards.surroundings import inside_autocast
from ..libraries import load
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.operators import schema_of
from ..runtime.torch_names.tensors import storage_key
from .captured import Captured
from .casts import Casts, Reads, Together, Watch
from .effects import is_random, updates_stats, writes
from .functions import as_eager
from .late_heads import linear_before, weight_later
from .losses import overwritten
from .true_strides import TrueStridesMode

_LONG_BLOCK_NODES = 48  # a longer stretch without a narrow point is cut at its narrowest point
_WIDEST_INTERFACE = 8
_REMEDY = "Let the forward make a new tensor instead of writing in place"
# As parametrizations do that are registered and removed inside the forward; peft's adapters of expert weights are such.
_SWAPPED = (
    "The forward swaps the parameter's memory, as an adapter of peft on experts or on their router does. Leave such "
    "layers out of the adapter, for example with targets=q_proj+k_proj+v_proj+o_proj"
)
_SMALL_BLOCK_SHARE = 0.02  # of the mean block's bytes: smaller ones are merged into a neighbour


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
class Chain:
    """The model as a chain of blocks.

    Parameters
    ----------
    prelude: nodes that depend on no parameter, in program order; computed once.
    blocks: the nodes of each block, in program order.
    facts: per node of the flat graph.
    made_in: block index of every chain node.
    rounded: parameters whose gradients add up in a lower precision -> that precision (see `Casts`).
    only_cast: parameters that are read in one lower precision only -> that precision (see `Reads`).
    """

    prelude: tuple[fx.Node, ...]
    blocks: tuple[tuple[fx.Node, ...], ...]
    facts: dict[fx.Node, Facts]
    made_in: dict[fx.Node, int]
    rounded: dict[fx.Node, torch.dtype]
    only_cast: dict[fx.Node, torch.dtype]


Cut = tuple[tuple[str, ...], ...]
"""By block, the names of its nodes."""


def partition(captured: Captured, trainable: frozenset[str], like: Cut = ()) -> Chain:
    """Cut the flat graph into a chain of blocks.

    Parameters
    ----------
    captured: the flat graph.
    trainable: placeholder names of the parameters that require a gradient.
    like: how the graph for another batch was cut. One of the same nodes is cut in the same places, which depend on
        sizes otherwise.

    Returns: the chain. Raises: CaptureError if a node writes into a parameter or an input.
    """
    casts, reads = Casts(), Reads()
    nodes = captured.graph.nodes
    casting = inside_autocast() or any(node.meta["region"].autocast for node in nodes if node.op == "call_function")
    facts = run_fake(captured, trainable, Together(casts, reads) if casting else casts)
    rounded = casts.rounded(captured.graph)
    graph = captured.graph
    sources = {n for n in graph.nodes if n.name in captured.params}
    dependence = load("networkx").DiGraph((a, n) for n in graph.nodes for a in n.all_input_nodes)
    dependence.add_nodes_from(graph.nodes)
    dependence.add_edges_from(_reads_of_writes(captured, facts))
    sources |= {n for n in graph.nodes if is_random(n)} | _touching_state(captured, facts)
    chained: set[fx.Node] = set(sources)
    ahead = list(sources)
    while ahead:
        new = [node for node in dependence.successors(ahead.pop()) if node not in chained]
        chained.update(new)
        ahead += new
    chained |= _written_late(graph, facts, chained)
    computing = [n for n in graph.nodes if n.op == "call_function"]
    chain = [n for n in computing if n in chained]
    if not chain:
        raise CaptureError("no operation of the model depends on a parameter; there is nothing to train")
    _check_writes(captured, facts, computing)
    if [name for block in like for name in block] == [node.name for node in chain]:
        cuts = list(accumulate(map(len, like)))[:-1]
        blocks = [tuple(chain[a:b]) for a, b in pairwise([0, *cuts, len(chain)])]
    else:
        cuts = _cuts(chain, facts, captured)
        blocks = [tuple(chain[a:b]) for a, b in pairwise([0, *cuts, len(chain)])]
        blocks = _merge_small(blocks, facts, captured)
    made_in = {n: i for i, block in enumerate(blocks) for n in block}
    prelude = tuple(n for n in computing if n not in chained)
    return Chain(prelude, tuple(blocks), facts, made_in, rounded, reads.only_cast())


def run_fake(captured: Captured, trainable: frozenset[str], watch: Watch) -> dict[fx.Node, Facts]:
    """Run the flat graph on fake tensors with autograd on, and note storages and gradients of every node.

    Parameters
    ----------
    trainable: placeholder names of the parameters that require a gradient. watch: sees the parameters and all nodes.
    """
    mode = TrueStridesMode()
    env: dict[fx.Node, Any] = {}
    facts: dict[fx.Node, Facts] = {}
    for node in captured.graph.nodes:
        if node.op == "output":
            continue
        written: tuple[int, ...] = ()
        if node.op == "placeholder":
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                with mode:
                    value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                if node.name in trainable:
                    value.requires_grad_()
                if node.name in captured.params:
                    watch.knows(node, value)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            # Autograd forbids writing into a leaf; where eager mode allows it, the region is under no_grad.
            with mode, node.meta["region"].entered(), watch.of(node):
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
    return {n: replace(f, requires_grad=_require_grad(f.value)) for n, f in facts.items()}


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


def _reads_of_writes(captured: Captured, facts: dict[fx.Node, Facts]) -> list[tuple[fx.Node, fx.Node]]:
    """List pairs of a node that writes into a storage and a later node that reads it."""
    edges: list[tuple[fx.Node, fx.Node]] = []
    writers: dict[int, fx.Node] = {}
    for node in captured.graph.nodes:
        if node.op != "call_function":
            continue
        read = {s for a in node.all_input_nodes for s in facts[a].storages}
        edges += [(writers[s], node) for s in sorted(read & writers.keys())]
        writers |= dict.fromkeys(written_storages(node, captured, facts), node)
    return edges


def written_storages(node: fx.Node, captured: Captured, facts: dict[fx.Node, Facts]) -> frozenset[int]:
    """Return the storages that a node writes into, including running statistics."""
    stats = [a for a in node.all_input_nodes if a.name in captured.buffers] if updates_stats(node) else []
    return frozenset({*facts[node].written, *(s for a in stats for s in facts[a].storages)})


def _touching_state(captured: Captured, facts: dict[fx.Node, Facts]) -> set[fx.Node]:
    """Find nodes that write into buffers, also through views: in the chain they run once and in program order."""
    buffers = {s for n in captured.graph.nodes if n.name in captured.buffers for s in facts[n].storages}
    computing = (n for n in captured.graph.nodes if n.op == "call_function")
    return {n for n in computing if buffers & written_storages(n, captured, facts)}


def _written_late(graph: fx.Graph, facts: dict[fx.Node, Facts], chained: set[fx.Node]) -> set[fx.Node]:
    """Find nodes whose storage a chain node writes, and all that depends on them; they belong to the chain, too."""
    targets = {s for n in chained if n in facts for s in facts[n].written}
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node in chained:
            continue
        if targets & set(facts[node].storages) or any(a in late for a in node.all_input_nodes):
            late.add(node)
    return late


def _check_writes(captured: Captured, facts: dict[fx.Node, Facts], computing: list[fx.Node]) -> None:
    owners = {s: n for n in captured.graph.nodes if n.op == "placeholder" for s in facts[n].storages}
    for node in computing:
        for storage in facts[node].written:
            owner = owners.get(storage)
            if owner is not None and owner.name not in captured.buffers:
                what = f"parameter {captured.params[owner.name]}" if owner.name in captured.params else owner.name
                remedy = _SWAPPED if node.target is torch.ops.aten.set_.source_Tensor else _REMEDY
                raise CaptureError(f"{node.target} writes into {what}, which a plan cannot repeat. {remedy}")


def _cuts(chain: list[fx.Node], facts: dict[fx.Node, Facts], captured: Captured) -> list[int]:
    """List the positions k, ascending, such that chain[k] may begin a new block."""
    widths = _widths(chain, facts, captured)
    cuts = [k for k, width in enumerate(widths) if k and width is not None and width[0] == 1]
    cuts = _first_of_runs(cuts, chain, facts)
    result: list[int] = []
    for start, end in zip([0, *cuts], [*cuts, len(chain)]):
        result += [start] if start else []
        result += _wider_cuts(start, end, widths)
    return result


def _wider_cuts(start: int, end: int, widths: list[tuple[int, int] | None]) -> list[int]:
    """Cut a long stretch without a narrow point recursively at its narrowest points."""
    if end - start <= _LONG_BLOCK_NODES:
        return []
    margin = _LONG_BLOCK_NODES // 6
    inside = ((widths[k], k) for k in range(start + margin, end - margin))
    inner = [(width, k) for width, k in inside if width is not None]
    if not inner:
        return []
    narrowest = min(width for width, _ in inner)
    if narrowest[0] > _WIDEST_INTERFACE:
        return []
    alike = [k for width, k in inner if width[0] == narrowest[0] and width[1] <= narrowest[1] * 1.01]
    cuts = [k for i, k in enumerate(alike) if i == 0 or k - alike[i - 1] > margin]
    parts = zip([start, *cuts], [*cuts, end])
    return sorted(cuts + [k for a, b in parts if (a, b) != (start, end) for k in _wider_cuts(a, b, widths)])


def _widths(chain: list[fx.Node], facts: dict[fx.Node, Facts], captured: Captured) -> list[tuple[int, int] | None]:
    """Return per position how many storages are live across it and their bytes; None where a cut is not allowed.

    Storages of placeholders do not count (they are always there), nor do those that only the model's output reads. No
    cut separates the making of a storage from the last write into it, logits that a loss may overwrite included.
    """
    resting = {s for n in captured.graph.nodes if n.op == "placeholder" for s in facts[n].storages}
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    barred = [False] * (len(chain) + 1)
    position = {n: k for k, n in enumerate(chain)}
    outputs = {s for n in captured.graph.nodes if n.name in captured.outputs for s in facts[n].storages}
    logits = overwritten(
        captured.graph,
        lambda n: facts[n].storages if n in facts else (),
        resting | outputs,
        lambda n: any(facts[n].requires_grad),
    )
    # A gradient that a block is given would be copied before it is handed on to the weight's.
    logits |= {s for n in chain if n.target is linear_before for s in facts[n].storages}
    for k, node in enumerate(chain):
        if node.target is weight_later:
            # Its place is the block that makes what it reads; what it hands on has no memory.
            (given,) = facts[node.all_input_nodes[0]].storages
            for between in range(made.get(given, k) + 1, k + 1):
                barred[between] = True
            continue
        tensors = [t for t in pytree.tree_leaves(facts[node].value) if isinstance(t, torch.Tensor)]
        for storage, tensor in zip(facts[node].storages, tensors):
            made.setdefault(storage, k)
            size[storage] = tensor.untyped_storage().nbytes()
        readers = [position[u] for u in node.users if u in position]
        for storage in facts[node].storages:
            last[storage] = max([last.get(storage, k), *readers])
        if isinstance(facts[node].value, (tuple, list)):
            picked = [r for r in readers if chain[r].target is operator.getitem]
            for between in range(k + 1, max(picked, default=k) + 1):
                barred[between] = True
        # The block that takes the loss may write a gradient over logits that it has made itself.
        read = logits & {s for a in node.all_input_nodes for s in facts[a].storages}
        for storage in (*facts[node].written, *read):
            for between in range(made.get(storage, 0) + 1, k + 1):
                barred[between] |= storage in made
    count, amount = [0] * (len(chain) + 2), [0] * (len(chain) + 2)
    for storage, first in made.items():
        if storage in resting or last[storage] <= first:
            continue
        for table, step in ((count, 1), (amount, size[storage])):
            table[first + 1] += step
            table[last[storage] + 1] -= step
    widths: list[tuple[int, int] | None] = []
    for k in range(len(chain)):
        if k:
            count[k], amount[k] = count[k] + count[k - 1], amount[k] + amount[k - 1]
        widths.append(None if barred[k] or count[k] == 0 else (count[k], amount[k]))
    return widths


def _first_of_runs(cuts: list[int], chain: list[fx.Node], facts: dict[fx.Node, Facts]) -> list[int]:
    """Keep the first of neighbouring cuts that are separated by views only."""
    kept: list[int] = []
    for k in cuts:
        before = kept[-1] if kept else 0
        if kept and all(_is_view(n, facts) for n in chain[before:k]):
            continue
        kept.append(k)
    return kept


def _is_view(node: fx.Node, facts: dict[fx.Node, Facts]) -> bool:
    inputs = {s for a in node.all_input_nodes for s in facts[a].storages}
    return bool(facts[node].storages) and set(facts[node].storages) <= inputs


def _merge_small(
    blocks: list[tuple[fx.Node, ...]], facts: dict[fx.Node, Facts], captured: Captured
) -> list[tuple[fx.Node, ...]]:
    """Merge a block too small to matter into the next one (the last into the one before)."""
    seen: set[fx.Node] = set()
    weights = []
    for block in blocks:
        params = {a for n in block for a in n.all_input_nodes if a.name in captured.params} - seen
        seen |= params
        made = {s for n in block for s in facts[n].storages}
        sizes = {
            storage_key(t.untyped_storage()): t.untyped_storage().nbytes()
            for n in [*block, *params]
            for t in pytree.tree_leaves(facts[n].value)
            if isinstance(t, torch.Tensor)
        }
        held = made | {s for p in params for s in facts[p].storages}
        weights.append(sum(sizes.get(s, 0) for s in held))
    limit = _SMALL_BLOCK_SHARE * sum(weights) / len(weights)
    merged: list[tuple[fx.Node, ...]] = []
    pending: tuple[fx.Node, ...] = ()
    for block, weight in zip(blocks, weights):
        block = pending + block
        pending = block if weight < limit else ()
        if not pending:
            merged.append(block)
    if pending:
        merged = [*merged[:-1], merged[-1] + pending] if merged else [pending]
    return merged
