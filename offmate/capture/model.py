"""A captured model cut into traced blocks: everything about it that needs no measurement."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..config import Config
from ..errors import CaptureError
from ..progress import Progress
from ..sizes import format_bytes
from .blocks import TracedBlock, trace_blocks
from .captured import Captured
from .casts import Reads
from .chain import Chain, Cut, partition, run_fake
from .converted import check_converted
from .data_dependent import named
from .export import capture
from .fake import memory_of
from .gradient_layouts import incoming_strides
from .kv_caches import with_cache_if_needed
from .late_heads import part_heads
from .layers import check_layers
from .leaves import check_elements, check_fast_path, check_leaves, check_outputs, check_shared_buffers
from .left_out import LeftOut
from .spec import Joint, LowPrecision, storages_of

log = logging.getLogger("offmate")

_MANY = 0.1  # of a model's bytes


@dataclass(frozen=True)
class Traced:
    """A captured model cut into traced blocks, before anything is measured.

    Parameters
    ----------
    incoming: strides of the gradients that output nodes receive from the user's backward, by the nodes' names.
    trainable: placeholders of the parameters that get a gradient. castable: parameters of which a copy in a lower
        precision may come to the device, with that precision; empty without a backward. low: those that move in it.
    """

    captured: Captured
    chain: Chain
    blocks: tuple[TracedBlock, ...]
    incoming: Mapping[str, tuple[int, ...]]
    trainable: frozenset[str] = frozenset()
    castable: Mapping[str, torch.dtype] = field(default_factory=dict)
    low: Mapping[str, LowPrecision] = field(default_factory=dict)

    @property
    def cut(self) -> Cut:
        """How it was cut into blocks."""
        return tuple(tuple(node.name for node in block) for block in self.chain.blocks)

    @property
    def differentiated(self) -> frozenset[str]:
        """The names of the output nodes that receive a gradient from the user's backward."""
        return frozenset(self.incoming)


def trace_model(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: Config,
    gradients: bool,
    say: Progress,
    real: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    device: torch.device | None = None,
    like: Cut = (),
) -> Traced:
    """Capture a model and trace its block classes.

    Parameters
    ----------
    gradients: whether a backward is wanted. say: reports progress.
    real, device: as in `capture`. like: as in `partition`.
    """
    say("capturing the model", 0.0)
    (check_layers if gradients else check_fast_path)(model)
    with torch.set_grad_enabled(gradients):
        captured = capture(model, args, kwargs, real, device)
        if gradients and (again := with_cache_if_needed(model, captured, kwargs)) is not None:
            captured = capture(model, args, again, real and (real[0], {**real[1], "use_cache": True}), device)
        captured = select_outputs(captured, config) if gradients else captured
    check_converted(model, captured, device)
    check_outputs(captured)
    check_elements(model, captured)
    if gradients:
        check_leaves(model, captured)
    params = dict(model.named_parameters(remove_duplicate=False))
    trainable = frozenset(n for n, name in captured.params.items() if gradients and params[name].requires_grad)
    part_heads(captured.graph, trainable)
    say("tracing blocks", 0.0)
    with named():
        chain = partition(captured, trainable, like)
    check_shared_buffers(model, captured, chain, gradients)
    castable = _convertible(model, captured, chain.only_cast) if gradients else {}
    _advise(model, castable)
    differentiated = choose_differentiated(captured, chain, config) if trainable else frozenset()
    for node, facts in chain.facts.items():
        node.meta["fake"] = facts.value
    into = {node.name: node for node in captured.graph.nodes if node.name in differentiated}
    incoming = incoming_strides(captured, into, config.gradient_layouts if gradients else {})
    blocks = trace_blocks(captured, chain, trainable, incoming, lambda done, total: say("tracing blocks", done / total))
    return Traced(captured, chain, blocks, incoming, trainable, castable)


def in_low_precision(traced: Traced, low: Mapping[str, LowPrecision]) -> Traced:
    """Return a traced model of which some parameters move in a lower precision, as copies or with their gradients only.

    The host casts copies, once per update, as autocast would do on the device for every use. Gradients of one
    micro-batch leave in this precision, in which autocast makes them.

    Parameters
    ----------
    low: by canonical name; all of them are castable.

    Source: SuperOffload, section 4.5 (where to cast).
    """
    if low == traced.low:
        return traced
    blocks = trace_blocks(traced.captured, traced.chain, traced.trainable, traced.incoming, low=low)
    return replace(traced, blocks=blocks, low=low)


def only_cast_of(model: torch.nn.Module, captured: Captured, held: Collection[torch.Tensor]) -> dict[str, torch.dtype]:
    """Return the float32 parameters that could be kept in a lower precision, with this precision, by name.

    Autocast casts them to it wherever they are read. Left out are those that the model returns or that share memory,
    those with a gradient from before, and trained ones with several casts.

    Parameters
    ----------
    held: parameters that count as trained, since they may be, even if they are frozen now.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    trained = {name for name, param in params.items() if param.requires_grad or param in held}
    trainable = frozenset(node for node, name in captured.params.items() if name in trained)
    reads = Reads()
    run_fake(captured, trainable, reads)
    return _convertible(model, captured, reads.only_cast())


def _convertible(
    model: torch.nn.Module, captured: Captured, only_cast: Mapping[fx.Node, torch.dtype]
) -> dict[str, torch.dtype]:
    params = dict(model.named_parameters(remove_duplicate=False))
    distinct = {id(tensor): tensor for tensor in (*params.values(), *model.buffers())}.values()
    sharing = Counter(memory_of(tensor) for tensor in distinct)
    found = {captured.params[n.name]: dtype for n, dtype in only_cast.items() if n.name not in captured.outputs}
    return {
        name: dtype
        for name, dtype in found.items()
        if (params[name].dtype, params[name].grad) == (torch.float32, None) and sharing[memory_of(params[name])] == 1
    }


def _advise(model: torch.nn.Module, castable: Mapping[str, torch.dtype]) -> None:
    """Say how to halve the bytes of frozen parameters, if they are many."""
    params = dict(model.named_parameters())
    found = {name: dtype for name, dtype in castable.items() if not params[name].requires_grad}
    size = sum(params[name].nbytes for name in found)
    if size > _MANY * sum(param.nbytes for param in params.values()):
        to = ", ".join(sorted({str(dtype) for dtype in found.values()}))
        log.warning(
            "%s of frozen parameters are float32, but torch.autocast casts them to %s wherever they are read. To halve "
            "their bytes in RAM, on the link and on the device with the same numbers, call offmate.cast_weights(model, "
            "example_inputs=...) inside the same torch.autocast, before offmate.compile",
            format_bytes(size), to,
        )  # fmt: skip


LOSS, FIRST = "loss", "0"  # a model that returns a tuple has no name for its loss, which is first in transformers


def select_outputs(captured: Captured, config: Config) -> Captured:
    """Leave out the outputs that the configuration does not keep; reading one raises an error that names it."""
    if config.outputs == "all":
        return captured
    results = captured.output_names[: captured.n_results]
    named = set(config.outputs)
    if LOSS in named - set(results) and _is_scalar(captured, results.index(FIRST) if FIRST in results else None):
        named = named - {LOSS} | {FIRST}
    absent = named - set(results)
    if absent:
        raise CaptureError(f"outputs names {', '.join(sorted(absent))}, but the model returns {', '.join(results)}")
    kept = tuple(
        o
        if name in named or not isinstance(o, str) or index >= captured.n_results
        else (LeftOut(name, config.outputs),)
        for index, (o, name) in enumerate(zip(captured.outputs, captured.output_names))
    )
    return replace(captured, outputs=kept)


def _is_scalar(captured: Captured, index: int | None) -> bool:
    """Whether the result with this index, if there is one, is a single number in the graph."""
    output = None if index is None else captured.outputs[index]
    node = next((n for n in captured.graph.nodes if n.name == output), None)
    value = None if node is None else node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


def choose_differentiated(captured: Captured, chain: Chain, config: Config) -> frozenset[str]:
    """Choose the output nodes that receive a gradient from backward(), and return their names."""
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
        for name in set(config.gradients_into) - set(captured.output_names[: captured.n_results]):
            if able[name].target is torch.ops.aten.clone.default:
                raise CaptureError(
                    f"gradients_into names {name}, but the forward writes into it after the plan has kept it, so the "
                    "gradient of the kept value is unknown. Let the forward make a new tensor instead of writing in "
                    "place (inplace=False), or return the tensor"
                )
        return frozenset(able[name].name for name in config.gradients_into)
    if not able:
        raise CaptureError("no output of the model depends on a trainable parameter; there is nothing to train")
    results = [able[name] for name in captured.output_names[: captured.n_results] if name in able]
    scalars = [n.name for n in results if chain.facts[n].value.dim() == 0]
    return frozenset(scalars[:1] or [n.name for n in results])


def structure(traced: Traced) -> str:
    """Hash everything about a traced model except its sizes.

    Two batches with the same structure have the same blocks, values and storages under the same names, so that the
    decisions for one apply to the other.
    """
    captured = traced.captured
    lines = [
        f"{captured.inputs} {captured.outputs} {sorted(captured.params.items())} {sorted(captured.buffers.items())}",
        f"{sorted(captured.constants)} {sorted(traced.differentiated)}",
        *(f"{node.name} {_target(node)} {node.all_input_nodes}" for node in traced.chain.prelude),
    ]
    for block in traced.blocks:
        spec = block.spec
        marks = [(e.node.name, e.kind, e.leaves, e.differentiable, e.final) for e in spec.externals]
        lines.append(f"{marks} {[n.name for n in spec.results]} {[index for index, _ in spec.tangents]}")
        lines += _joint_lines(block.joint)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _target(node: fx.Node) -> str:
    """Return the name of what a node runs, which is the same in every process."""
    return node.target.__name__ if inspect.isfunction(node.target) else str(node.target)


def _joint_lines(joint: Joint) -> list[str]:
    number: dict[int, int] = {}

    def storages(node: fx.Node) -> list[int]:
        return [number.setdefault(s, len(number)) for s in storages_of(node)]

    lines = [f"{n.name} {_target(n)} {n.all_input_nodes} {storages(n)}" for n in joint.graph.nodes]
    ports = (joint.leaves, joint.tangents, joint.accumulators, joint.results, joint.grads, sorted(joint.writes.items()))
    return [*lines, f"{ports} {joint.forward}"]
