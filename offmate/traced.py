"""A captured model cut into traced blocks: everything about it that no number enters."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .blocks import TracedBlock, trace_blocks
from .capture import Captured, capture
from .config import Config
from .errors import CaptureError
from .joint import Joint, storages_of
from .partition import Chain, partition
from .progress import Progress

log = logging.getLogger("offmate")


@dataclass(frozen=True)
class Traced:
    """A captured model cut into traced blocks, before any number is known."""

    captured: Captured
    chain: Chain
    blocks: tuple[TracedBlock, ...]
    differentiated: frozenset[str]


def trace_model(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: Config,
    gradients: bool,
    say: Progress,
    real: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    device: torch.device | None = None,
) -> Traced:
    """Capture a model and trace its block classes.

    Parameters
    ----------
    gradients: whether a backward is wanted. say: told of progress.
    real, device: as in `capture`.
    """
    say("capture", 0.0)
    captured = select_outputs(capture(model, args, kwargs, real, device), config)
    for warning in captured.warnings:
        log.warning(warning)
    params = dict(model.named_parameters(remove_duplicate=False))
    trainable = frozenset(n for n, name in captured.params.items() if gradients and params[name].requires_grad)
    say("blocks", 0.0)
    chain = partition(captured, trainable)
    differentiated = choose_differentiated(captured, chain, config) if trainable else frozenset()
    blocks = trace_blocks(captured, chain, trainable, differentiated, lambda done, total: say("blocks", done / total))
    return Traced(captured, chain, blocks, differentiated)


def select_outputs(captured: Captured, config: Config) -> Captured:
    """Leave out the outputs that the configuration does not keep."""
    if config.outputs == "all":
        return captured
    absent = set(config.outputs) - set(captured.output_names)
    if absent:
        raise CaptureError(
            f"outputs names {', '.join(sorted(absent))}, but the model returns {', '.join(captured.output_names)}"
        )
    kept = tuple(
        o if name in config.outputs or not isinstance(o, str) else (None,)
        for o, name in zip(captured.outputs, captured.output_names)
    )
    return replace(captured, outputs=kept)


def choose_differentiated(captured: Captured, chain: Chain, config: Config) -> frozenset[str]:
    """Names of the output nodes into which backward() will hand a gradient."""
    able = {}
    for output, name in zip(captured.outputs, captured.output_names):
        node = next((n for n in chain.made_in if n.name == output), None)
        if node is not None and chain.facts[node].requires_grad[0]:
            able[name] = node
    if config.gradients_into != "auto":
        absent = set(config.gradients_into) - set(able)
        if absent:
            raise CaptureError(
                f"gradients_into names {', '.join(sorted(absent))}; outputs that can have a gradient: {', '.join(able)}"
            )
        return frozenset(able[name].name for name in config.gradients_into)
    if not able:
        raise CaptureError("no output of the model depends on a trainable parameter; there is nothing to train")
    scalars = [n.name for n in able.values() if chain.facts[n].value.dim() == 0]
    return frozenset(scalars[:1] or [n.name for n in able.values()])


def structure(traced: Traced) -> str:
    """A hash of everything about a traced model but its sizes.

    Two batches with one structure have the same blocks, values and storages under the same names, so that what is
    decided for one can be done with the other.
    """
    captured = traced.captured
    lines = [
        f"{captured.inputs} {captured.outputs} {sorted(captured.params.items())} {sorted(captured.buffers.items())}",
        f"{sorted(captured.constants)} {sorted(traced.differentiated)}",
        *(f"{node.name} {node.target} {node.all_input_nodes}" for node in traced.chain.prelude),
    ]
    for block in traced.blocks:
        spec = block.spec
        marks = [(e.node.name, e.kind, e.leaves, e.differentiable, e.final) for e in spec.externals]
        lines.append(f"{marks} {[n.name for n in spec.results]} {[index for index, _ in spec.tangents]}")
        lines += _joint_lines(block.joint)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _joint_lines(joint: Joint) -> list[str]:
    number: dict[int, int] = {}

    def storages(node: fx.Node) -> list[int]:
        return [number.setdefault(s, len(number)) for s in storages_of(node)]

    lines = [f"{n.name} {n.target} {n.all_input_nodes} {storages(n)}" for n in joint.graph.nodes]
    ports = (joint.leaves, joint.tangents, joint.accumulators, joint.results, joint.grads, sorted(joint.writes.items()))
    return [*lines, f"{ports} {joint.forward}"]
