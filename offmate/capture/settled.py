"""Refuses forwards that leave a model in a state from which the next call would differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..errors import CaptureError
from ..runtime.torch_names.operators import OpOverload


def check_modules(before: dict[str, torch.nn.Module], after: dict[str, torch.nn.Module]) -> None:
    """Raise CaptureError if a forward has put other submodules into the model: a replay would not.

    Parameters
    ----------
    before, after: all modules by path, before and after the forward.
    """
    for path, module in after.items():
        was = before.get(path)
        if was is not module:
            change = f"of class {type(was).__name__}" if was is not None else "which was not there before"
            raise CaptureError(
                f"the forward sets the submodule {path}, {change}, to a new {type(module).__name__}, which a graph "
                "cannot follow. If only the first call does so, run the model once before offmate.compile. Otherwise, "
                "create all submodules in __init__"
            )


def check_settled(observed: Any, again: Any) -> None:
    """Raise CaptureError if a second forward, which starts from the state that the first left, leaves another one.

    Parameters
    ----------
    observed, again: the observers of both.
    """
    for path in again.unsettled:
        was = observed.changed[path][2] if path in observed.changed else "what it was"
        raise CaptureError(
            f"the forward changes {path[1:]} at every call and reads it (it left {was!r}, then "
            f"{again.changed[path][2]!r}), so one graph cannot stand for several calls. Make it a buffer "
            "(register_buffer) and change it with tensor operations. Or change it in the loop, outside of the forward; "
            "each value then gets its own plan"
        )


def check_kept(observed: Any, graph: fx.Graph, outputs: tuple[Any, ...], fixed: frozenset[str]) -> None:
    """Raise CaptureError if a tensor attribute that the forward reads and then sets carries values between calls.

    A cache of values that depend only on constants does not: recomputing it gives the same values.

    Parameters
    ----------
    observed: the forward's observer. outputs: outputs of the graph, by-products last.
    fixed: placeholders of constants and of buffers that no forward writes.
    """
    counts = [by_product.n_tensors for by_product, _ in observed.by_products]
    node_of = {node.name: node for node in graph.nodes}
    for path, index in observed.kept.items():
        first = len(outputs) - sum(counts[index:])
        made = [o for o in outputs[first : first + counts[index]] if isinstance(o, str)]
        if any(_depends(node_of[name], fixed) for name in made):
            raise CaptureError(
                f"the forward reads {path[1:]} and sets it to a new tensor. Each call thus depends on the previous "
                "one, which a graph cannot follow. Register it as a buffer (register_buffer) from the start, or let "
                "the forward set it before reading it"
            )


def _depends(node: fx.Node, fixed: frozenset[str]) -> bool:
    """Return whether a node's value may differ from call to call."""
    waiting, seen = [node], set()
    while waiting:
        now = waiting.pop()
        if now in seen:
            continue
        seen.add(now)
        if now.op == "placeholder" and now.name not in fixed:
            return True
        if isinstance(now.target, OpOverload) and torch.Tag.nondeterministic_seeded in now.target.tags:
            return True
        waiting += now.all_input_nodes
    return False
