"""Exports a model with a batch into one flat ATen graph, whose nodes keep their grad mode and autocast region."""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from ..errors import CaptureError, LibraryError
from ..guards.python_state import python_restored
from ..libraries import library_errors
from ..machines.devices import rng_untouched
from ..runtime.layouts import as_layout
from ..runtime.torch_names import tracing
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.operators import HigherOrderOperator
from ..runtime.torch_names.tracing import FakeTensor
from ..transformers_names import forwards_as_in_eager
from . import batch_decisions
from .captured import Captured, Region
from .data_dependent import LineWanted, NotFixed, NotFollowed, ValuesTaken, named
from .effects import updates_stats, writes
from .fake import fake_batch, faked
from .functions import functions_kept
from .hooks import only_packages_hooks
from .inner_calls import inner_calls_followed
from .known import values_known
from .kv_caches import caches_dropped
from .losses import tile_losses
from .lstm_precision import LstmPrecision
from .not_exported import refusal
from .observe import Observer
from .outputs import as_kept, output_names, outputs_of
from .settled import check_kept, check_settled
from .tidy import tidy

log = logging.getLogger("offmate")

_HELD = (InputKind.PARAMETER, InputKind.BUFFER)

_instances = itertools.count(1)


def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    real: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    device: torch.device | None = None,
) -> Captured:
    """Export the model's forward for this batch and flatten it.

    Parameters
    ----------
    model: in the mode (train or eval) in which it will run.
    args, kwargs: one batch; only shapes, dtypes, Python values and the decisions of rule 1 are taken from it.
    real: the batch on which to take those decisions, if `args` and `kwargs` are fake.
    device: the device to capture for, if it is not the one that parameters are on: kernels depend on it.

    Returns: the flat graph. Raises: CaptureError naming the construct that does not export.
    """
    try:
        return _captured(model, args, kwargs, real, device, fixes_values=False)
    except ValuesTaken as error:
        first = error
    try:
        # To fix values makes plans for fewer batches, and to find which ones takes another forward.
        return _captured(model, args, kwargs, real, device, fixes_values=True)
    except NotFollowed:
        raise
    except NotFixed as more:
        raise CaptureError(f"{first}. {more}") from first
    except Exception:  # what cannot be captured for given values either is refused as it was
        raise first from None


def _captured(
    model: torch.nn.Module, args: Any, kwargs: Any, real: Any, device: torch.device | None, fixes_values: bool
) -> Captured:
    try:
        with tracing.without_stack_traces():
            return _capture(model, args, kwargs, real, device, fixes_values)
    except LineWanted:
        # To note the model's line for every operator is a fifth of what exporting takes, and only this error shows one.
        return _capture(model, args, kwargs, real, device, fixes_values)


def _capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    real: tuple[tuple[Any, ...], dict[str, Any]] | None,
    device: torch.device | None,
    fixes_values: bool,
) -> Captured:
    program, observed, taken = _exported(model, args, kwargs, real, device, fixes_values)
    graph = fx.Graph()
    _inline(program.graph_module, graph)
    tidy(graph)
    tile_losses(graph, device or torch.device("cpu"))
    signature = program.graph_signature
    kinds: dict[InputKind, dict[str, Any]] = {kind: {} for kind in InputKind}
    inputs: list[str | None] = []
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for spec, node in zip(signature.input_specs, placeholders, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            inputs.append(node.name if isinstance(node.meta.get("val"), torch.Tensor) else None)
        else:
            kinds[spec.kind][node.name] = spec.target
    if kinds[InputKind.CUSTOM_OBJ] or kinds[InputKind.TOKEN]:
        raise CaptureError(
            "the model holds script objects (a random generator of its own is one) or effect tokens, which cannot be "
            "replayed; draw from torch's default generator"
        )
    every = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    read = {kind: {name: every[target] for name, target in kinds[kind].items()} for kind in _HELD}
    params = _tied(read[InputKind.PARAMETER], model.named_parameters(), graph)
    outputs = _as_views(graph, as_kept(graph, outputs_of(program, graph), observed), params)
    check_kept(observed, graph, outputs, _fixed(kinds, graph, program, observed))
    return Captured(
        graph=graph,
        params=params,
        buffers=_tied(read[InputKind.BUFFER], model.named_buffers(), graph),
        constants={name: program.constants[target] for name, target in kinds[InputKind.CONSTANT_TENSOR].items()},
        inputs=tuple(inputs),
        outputs=outputs,
        output_names=output_names(program, observed),
        out_spec=program.call_spec.out_spec,
        taken=taken,
        by_products=tuple(by_product for by_product, _ in observed.by_products),
        read=observed.read,
        free=observed.free,
        changed=tuple((holder, name, value) for holder, name, value, _ in observed.changed.values()),
    )


def _exported(
    model: torch.nn.Module, args: Any, kwargs: Any, real: Any, device: torch.device | None, fixes_values: bool
) -> tuple[Any, Observer, tuple[batch_decisions.Decision, ...]]:
    """Return the exported program, what its forward was seen to do, and the decisions of rule 1."""
    args, kwargs = pytree.tree_map(_distinct, (args, kwargs))
    with rng_untouched(device), _checkpointing_off(model), python_restored(model), inner_calls_followed():
        with python_restored(model), only_packages_hooks(model):
            values = real or pytree.tree_map(_on_host, (args, kwargs))
            taken = batch_decisions.record(model, values[0], values[1], fixes_values)
        known = _known(model, taken, values, device) if fixes_values else contextlib.nullcontext()
        with (
            _on_device(model, args, kwargs, device) as batch,
            batch_decisions.hold(taken),
            caches_dropped(model),
            known,
        ):
            return (*_observed_export(model, batch, taken), taken)


def _known(
    model: torch.nn.Module, taken: tuple[batch_decisions.Decision, ...], batch: Any, device: torch.device | None
) -> contextlib.AbstractContextManager[None]:
    """Let the forward find the tensors whose values were decisions with these values, on the device to capture for."""
    leaves = pytree.tree_leaves(batch)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    fixed = [tensors[d.source] for d in taken if isinstance(d.source, int)]
    on = next(model.parameters()).device if device is None else device
    return values_known(model, {index: leaves[index].to(on, copy=True) for index in fixed}, tuple(batch[1]))


def _fixed(kinds: dict[InputKind, dict[str, Any]], graph: fx.Graph, program: Any, observed: Observer) -> frozenset[str]:
    """Return placeholders whose values no call changes: constants that the forward does not set, unwritten buffers."""
    written = {a.name for n in graph.nodes if writes(n) or updates_stats(n) for a in n.all_input_nodes}
    constants = {
        n for n, target in kinds[InputKind.CONSTANT_TENSOR].items() if not observed.sets(program.constants[target])
    }
    return frozenset({*constants, *kinds[InputKind.BUFFER]} - written)


def _tied(own: dict[str, Any], distinct: Iterable[tuple[str, Any]], graph: fx.Graph) -> dict[str, str]:
    """Map placeholder names to canonical names, merging the placeholders of a tensor that has several names.

    Parameters
    ----------
    own: placeholder -> tensor. distinct: name and tensor, once per tensor.
    """
    canonical = {id(tensor): name for name, tensor in distinct}
    first: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in own:
            same = first.setdefault(canonical[id(own[node.name])], node)
            if same is not node:
                node.replace_all_uses_with(same)
    return {node.name: name for name, node in first.items()}


def _as_views(graph: fx.Graph, outputs: tuple[Any, ...], params: dict[str, str]) -> tuple[Any, ...]:
    """Return the outputs, in which a view stands for a parameter that the model returns: a replay returns copies."""
    nodes = {node.name: node for node in graph.nodes}
    found = []
    for output in outputs:
        if output in params:
            value = nodes[output].meta["val"]
            with graph.inserting_before(next(node for node in graph.nodes if node.op == "output")):
                view = graph.call_function(torch.ops.aten.view.default, (nodes[output], list(value.shape)))
            view.meta |= {"val": value, "region": Region(torch.is_grad_enabled())}
            output = view.name
        found.append(output)
    return tuple(found)


def _distinct(leaf: Any) -> Any:
    """Copy a tensor, since export merges two inputs that are one tensor, and the next batch may hold two.

    The copy has the strides of the original, since a forward may read them.
    """
    if isinstance(leaf, FakeTensor) or not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout is not torch.strided:
        return leaf.detach().clone()
    return as_layout(leaf.detach(), leaf.shape, leaf.stride())


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) else leaf


@contextlib.contextmanager
def _on_device(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Make the model fake on that device inside the body, and yield the batch to go with it."""
    if device is None:
        yield args, kwargs
        return
    with faked(model, device) as mode:
        yield fake_batch(mode, (args, kwargs), device)


def _observed_export(
    model: torch.nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]], taken: tuple[batch_decisions.Decision, ...]
) -> tuple[Any, Observer]:
    """Export the model, and observe the side effects of its forward.

    Raises: CaptureError if the forward counts its calls, or otherwise depends on state that an earlier call has left.
    """
    observer = Observer(model)
    with observer.watching():
        program = _export(model, *batch)
    if observer.unsettled:
        # Export again from the state of the next call: a cache then stays as it is, a counter does not.
        observer.put_changes()
        again = Observer(model)
        with batch_decisions.hold(taken), again.watching():
            _export(model, *batch)
        check_settled(observer, again)
    return program, observer


def _export(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        as_in_eager: list[contextlib.AbstractContextManager[Any]] = [
            functions_kept(),
            tracing.nothing_folded(),
            tracing.said_by_errors_alone(),
            _caches_as_in_eager(),
            forwards_as_in_eager(model),
            LstmPrecision(),
        ]
        with warnings.catch_warnings(), contextlib.ExitStack() as stack, named(), library_errors():
            for context in as_in_eager:
                stack.enter_context(context)
            # Attributes that are set become by-products.
            warnings.filterwarnings("ignore", message="The tensor attribute")
            return torch.export.export(model, args, kwargs, strict=False)
    except (CaptureError, LibraryError):
        raise
    except Exception as error:
        raise refusal(model, error) from error


def _caches_as_in_eager() -> contextlib.AbstractContextManager[Any]:
    """Give autocast regions the cache setting of eager mode, although tracing switches the cache off."""
    cached, made = torch.is_autocast_cache_enabled(), torch.autocast.__init__

    def make(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        made(self, device_type, dtype, enabled, cached if cache_enabled is None else cache_enabled)

    return mock.patch.object(torch.autocast, "__init__", make)


@contextlib.contextmanager
def _checkpointing_off(model: torch.nn.Module) -> Iterator[None]:
    """Switch off the model's own gradient checkpointing during capture: the plan recomputes better."""
    switched = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    if switched:
        log.info("gradient checkpointing of the model is ignored: the plan decides what is recomputed")
    for module in switched:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True  # type: ignore[assignment]


def _inline(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Copy `module`'s nodes into `graph`, every node under its region (rule 4).

    Raises: CaptureError for a higher-order operator.
    """
    env: dict[fx.Node, Any] = {}
    region = Region(torch.is_grad_enabled())
    around: dict[fx.Node, Region] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            env[node] = getattr(module, node.target)
        elif node.target is tracing.set_grad_enabled:
            region = replace(region, grad=bool(node.args[0]))
        elif node.target is tracing.enter_autocast:
            around[node] = region
            kind, dtype, enabled, cache = node.args
            region = replace(
                region, autocast=(kind, dtype, enabled, cache), instance=region.instance or next(_instances)
            )
        elif node.target is tracing.exit_autocast:
            before = around[node.args[0]]
            region = replace(before, grad=region.grad)
        elif isinstance(node.target, HigherOrderOperator):
            name = node.target.name()
            raise CaptureError(
                f"the model uses the higher-order operator {name} ({node.format_node()}), which cannot be "
                "replayed; write it as plain tensor operations (for flex_attention: attn_implementation='sdpa')"
            )
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
            if node.op == "call_function":
                env[node].meta["region"] = region
