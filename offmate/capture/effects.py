"""Side effects of a node of a graph: random draws, and writes into its arguments."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..runtime.operators.checks import CHECKS
from ..runtime.torch_names.operators import ATTENTION, OpOverload, schema_of


def has_effect(node: fx.Node) -> bool:
    """Return whether a node must stay although nothing reads it: placeholders, outputs, checks, draws and writes."""
    if node.op in ("placeholder", "output"):
        return True
    effects = (is_random, writes, updates_stats)
    return isinstance(node.target, OpOverload) and (node.target in CHECKS or any(has(node) for has in effects))


def is_random(node: fx.Node) -> bool:
    """Return whether the node draws random numbers."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if any(argument.name == "philox_seed" for argument in schema_of(node.target).arguments):
        return False  # a backward of fused attention draws again what its forward drew, from the seed it is given
    probability = _dropout_probability(node)
    return probability is None or probability > 0


def _dropout_probability(node: fx.Node) -> float | None:
    """Return the probability of an operator that draws only if it is above 0; None for one that always draws."""
    target: Any = node.target
    arguments: dict[str, Any] = {a.name: v for a, v in zip(schema_of(target).arguments, node.args)} | dict(node.kwargs)
    if arguments.get("train") is False or arguments.get("training") is False:
        return 0.0
    for name in ("dropout_p", "dropout"):
        if isinstance(arguments.get(name), (int, float)):
            return float(arguments[name])
    name = str(node.target)
    if any(kernel in name for kernel in ATTENTION):
        return 0.0
    return None


def writes(node: fx.Node) -> bool:
    """Return whether the node's schema declares a write into an argument."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return bool(schema_of(node.target).is_mutable)


def refused_write(node: fx.Node, what: str) -> str:
    """Say that a node writes into what no forward may write into, and what to do instead."""
    start = f"{node.target} writes into {what}; a replay could not repeat it. "
    if node.target is torch.ops.aten.embedding_renorm_.default:
        return start + (
            "An embedding with max_norm scales its weight so in every forward: leave max_norm out, and call "
            "torch.embedding_renorm_(weight, ids, max_norm, norm_type) under torch.no_grad() in the loop, before the "
            "model, which gives the same numbers"
        )
    return start + "Let the forward make a new tensor instead of writing in place"


def written_into(node: fx.Node) -> fx.Node | None:
    """Return the argument that a node writes into and returns, as `add_` does; None for any other node."""
    if not writes(node):
        return None
    schema = schema_of(node.target)
    returned = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    if returned is None:
        return None
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == returned.before_set:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            return given if isinstance(given, fx.Node) else None
    return None


def updates_stats(node: fx.Node) -> bool:
    """Return whether a node writes running statistics, as batch_norm does in training without declaring it."""
    if not str(node.target).startswith(("aten.batch_norm", "aten.instance_norm")):
        return False
    given = dict(zip(("input", "weight", "bias", "mean", "var", "own"), node.args)) | dict(node.kwargs)
    return all(given.get(name) is not False for name in ("own", "training", "use_input_stats"))


def base_of(node: Any) -> Any:
    """Return the node in whose memory a node's value lies, as far as schemas tell."""
    while isinstance(node, fx.Node) and node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        schema = schema_of(node.target)
        views = schema is not None and schema.arguments[0].alias_info is not None
        if not views and node.target is not operator.getitem:
            return node
        node = node.args[0]
    return node
