"""Roofline estimates of an operator's seconds on another machine: from its FLOPs, its bytes and the machine's rates."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..capture.spec import Joint, storages_of
from ..machines.hardware import Hardware
from ..programs.programs import NodeCost
from ..runtime.operators.losses import IN_TILES, InTiles
from ..runtime.torch_names import operators
from ..runtime.torch_names import trees as pytree


def node_costs(joint: Joint, machine: Hardware) -> dict[str, NodeCost]:
    """Estimate the cost of every operator of a class, without running it.

    Returns: by node name; views cost the device nothing. Workspaces are assumed to be zero, but for a loss in tiles.
    """
    return {
        n.name: NodeCost(_seconds(n, machine), _workspace(n), launch_s=_launch_s(n, machine))
        for n in (*joint.forward, *joint.backward)
    }


def _seconds(node: fx.Node, machine: Hardware) -> float:
    in_tiles = IN_TILES.get(node.target)
    if node.target is operator.getitem or (_is_view(node) and in_tiles is None):
        return 0.0
    made = [t for t in pytree.tree_leaves(node.meta["val"]) if isinstance(t, torch.Tensor)]
    read = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    traffic = sum(t.numel() * t.element_size() for t in [*made, *read])
    if in_tiles is not None:
        traffic = in_tiles.moved_bytes(*_logits(node, in_tiles))
    dtype = str(made[0].dtype).removeprefix("torch.") if made else "float32"
    return max(flops(node) / machine.flops_per_s(dtype), traffic / machine.memory_bytes_per_s, machine.launch_s)


def _launch_s(node: fx.Node, machine: Hardware) -> float:
    # Views are instructions, too; parts of a result belong to the operator that makes it.
    return 0.0 if node.target is operator.getitem else machine.instruction_s


def _workspace(node: fx.Node) -> int:
    in_tiles = IN_TILES.get(node.target)
    return in_tiles.workspace_bytes(*_logits(node, in_tiles)) if in_tiles is not None else 0


def _logits(node: fx.Node, in_tiles: InTiles) -> tuple[torch.Tensor, torch.dtype]:
    """Return the logits of an operator in tiles, and its full precision: of what a backward gets, or of results."""
    full: Any = node if in_tiles.logits == 0 else node.args[0]
    logits: Any = node.args[in_tiles.logits]
    value = full.meta["val"]
    return logits.meta["val"], (value if isinstance(value, torch.Tensor) else value[0]).dtype


def _is_view(node: fx.Node) -> bool:
    given = {s for a in node.all_input_nodes for s in storages_of(a)}
    own = set(storages_of(node))
    return bool(own) and own <= given


def flops(node: fx.Node) -> int:
    """Count the floating-point operations of a node; 0 for an operator that is bound by memory anyway."""
    args: Any = fx.map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = fx.map_arg(node.kwargs, lambda n: n.meta["val"])
    if "attention" in str(node.target):
        args = _with_all_heads(args)
    if node.target is operators.attention_on_cpu:
        causal = bool(args[4]) if len(args) > 4 else bool(kwargs.get("is_causal", False))
        return operators.flops_of_attention(*(t.shape for t in args[:3])) // (2 if causal else 1)
    if node.target is operators.attention_on_cpu_backward:
        causal = bool(args[7])
        return operators.flops_of_attention_backward(*(t.shape for t in args[:4])) // (2 if causal else 1)
    count = operators.flop_counts.get(getattr(node.target, "overloadpacket", None))
    return int(count(*args, **kwargs, out_val=node.meta["val"])) if count is not None else 0


def _with_all_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of attention with all heads of keys and values; torch 2.11 cannot count grouped ones."""
    heads = [arg.shape[1] for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 4]

    def whole(arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor) or arg.dim() != 4 or arg.shape[1] == max(heads):
            return arg
        samples, _, tokens, width = arg.shape
        return torch.empty(samples, max(heads), tokens, width, device="meta", dtype=arg.dtype)

    return tuple(map(whole, args))
