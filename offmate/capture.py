"""From a model and a batch to one flat ATen graph: export, inline, and note what the nodes' values are."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from . import decisions
from .caches import caches_dropped
from .devices import rng_untouched
from .errors import CaptureError
from .fake import fake_batch, faked

log = logging.getLogger("offmate")

_GRAD_HOP = "wrap_with_set_grad_enabled"
_AUTOCAST_HOP = "wrap_with_autocast"


@dataclass(frozen=True)
class Region:
    """The modes that a node runs under: grad mode and, inside the model's own autocast regions, that region.

    autocast: (device type, dtype, enabled, cache enabled), None outside any region of the model's own.
    """

    grad: bool = True
    autocast: tuple[str, torch.dtype | None, bool, bool | None] | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run the body under these modes."""
        with contextlib.ExitStack() as stack:
            if not self.grad:
                stack.enter_context(torch.no_grad())
            if self.autocast is not None:
                kind, dtype, enabled, cache = self.autocast
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield


@dataclass(frozen=True)
class Captured:
    """A model's forward as one flat graph of ATen operators, not yet functional.

    Parameters
    ----------
    graph: placeholders, call_function nodes with `meta["region"]`, one output node.
    params: placeholder name -> canonical parameter name (a tied weight is one placeholder).
    buffers: placeholder name -> canonical buffer name.
    constants: placeholder name -> tensor lifted by export.
    inputs: per leaf of the flattened (args, kwargs): placeholder name, or None for a leaf that is no tensor.
    outputs: per leaf of the flattened output: node name, or the constant itself wrapped in a 1-tuple.
    output_names: readable path of every output leaf, such as "loss".
    out_spec: how to rebuild the output.
    taken: decisions that were held (rule 1).
    """

    graph: fx.Graph
    params: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: tuple[str | None, ...]
    outputs: tuple[str | tuple[Any], ...]
    output_names: tuple[str, ...]
    out_spec: Any
    taken: tuple[decisions.Decision, ...] = ()
    warnings: tuple[str, ...] = field(default=())


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
    real: the batch to take those decisions on, where `args` and `kwargs` are fake.
    device: what to capture for, where it is not the one that parameters are on: kernels depend on it.

    Returns: the flat graph. Raises: CaptureError naming the construct that does not export.
    """
    args, kwargs = pytree.tree_map(_distinct, (args, kwargs))
    with rng_untouched(device), _checkpointing_off(model), _autograd_functions_noted() as functions:
        taken = decisions.record(model, *(real or pytree.tree_map(_on_host, (args, kwargs))))
        with _on_device(model, args, kwargs, device) as batch, decisions.hold(taken), caches_dropped(model):
            program = _export(model, *batch)
    notes = tuple(
        f"{name} is a custom autograd.Function; export replaces its backward by that of its forward, "
        "so gradients may differ from eager in the last bits"
        for name in sorted(functions)
    )
    graph = fx.Graph()
    _inline(program.graph_module, graph)
    _tidy(graph)
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
        raise CaptureError("the model holds script objects or effect tokens, which cannot be replayed")
    names = _output_names(program)
    return Captured(
        graph=graph,
        params=_tied(model, graph, kinds[InputKind.PARAMETER]),
        buffers=kinds[InputKind.BUFFER],
        constants={name: program.constants[target] for name, target in kinds[InputKind.CONSTANT_TENSOR].items()},
        inputs=tuple(inputs),
        outputs=_outputs(program, graph),
        output_names=names,
        out_spec=program.call_spec.out_spec,
        taken=taken,
        warnings=notes,
    )


def _tied(model: torch.nn.Module, graph: fx.Graph, params: dict[str, str]) -> dict[str, str]:
    """Placeholder name -> canonical parameter name, a tied weight's placeholders made one."""
    canonical = {param: name for name, param in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    first: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in params:
            same = first.setdefault(canonical[every[params[node.name]]], node)
            if same is not node:
                node.replace_all_uses_with(same)
    return {node.name: name for name, node in first.items()}


def _distinct(leaf: Any) -> Any:
    """Export merges two inputs that are one tensor; the next batch may hold two."""
    if isinstance(leaf, FakeTensor) or not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone()


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) else leaf


@contextlib.contextmanager
def _on_device(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The batch, for the body, for a model that is as if on that device."""
    if device is None:
        yield args, kwargs
        return
    with faked(model, device) as mode:
        yield fake_batch(mode, (args, kwargs), device)


def _export(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return torch.export.export(model, args, kwargs, strict=False)
    except CaptureError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"{type(model).__name__} does not export: {type(error).__name__}: {first}. torch.export follows no branch "
            "on a tensor's values, no data-dependent shape and no object it does not know (a cache, for example); "
            "run torch.export.export(model, args, kwargs, strict=False) to see the line, replace that construct, "
            "or choose attn_implementation='sdpa' or 'eager' for a Hugging Face model"
        ) from error


@contextlib.contextmanager
def _checkpointing_off(model: torch.nn.Module) -> Iterator[None]:
    """Gradient checkpointing of the model's own is off during capture: the plan recomputes better."""
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


@contextlib.contextmanager
def _autograd_functions_noted() -> Iterator[set[str]]:
    """Collect the names of custom autograd.Functions that run, since export keeps their forward only."""
    seen: set[str] = set()
    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def noting(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            seen.add(cls.__name__)
        return original(cls, *args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(noting)):
        yield seen


def _inline(
    module: fx.GraphModule,
    graph: fx.Graph,
    args: list[Any] | None = None,
    region: Region | None = None,
) -> Any:
    """Copy `module`'s nodes into `graph`, wrapped regions flattened, every node under its region (rule 4)."""
    region = region or Region()
    env: dict[fx.Node, Any] = {}
    given = iter(args or [])
    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given) if args is not None else graph.node_copy(node, lambda n: env[n])
        elif node.op == "get_attr":
            env[node] = getattr(module, node.target)
        elif node.op == "output":
            result = fx.map_arg(node.args[0], lambda n: env[n])
            if args is None:
                graph.output(result)
            return result
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            env[node] = _inline_region(node, graph, env, region)
        elif node.target is operator.getitem and isinstance(env[node.args[0]], (tuple, list)):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].meta["region"] = region
    raise CaptureError("a captured graph has no output")


def _inline_region(node: fx.Node, graph: fx.Graph, env: dict[fx.Node, Any], region: Region) -> Any:
    arguments: list[Any] = list(fx.map_arg(node.args, lambda n: env[n]))
    name = node.target.name() if hasattr(node.target, "name") else str(node.target)
    if name == _GRAD_HOP:
        enabled, body, *rest = arguments
        return _inline(body, graph, rest, Region(bool(enabled), region.autocast))
    if name == _AUTOCAST_HOP:
        kind, dtype, enabled, cache, body, *rest = arguments
        return _inline(body, graph, rest, Region(region.grad, (kind, dtype, enabled, cache)))
    raise CaptureError(
        f"the model uses the higher-order operator {name} ({node.format_node()}), which cannot be replayed; "
        "write it as plain tensor operations (for flex_attention: attn_implementation='sdpa')"
    )


def _tidy(graph: fx.Graph) -> None:
    """Drop assertions, casts that change nothing, and dead code (random and writing operators stay)."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = str(node.target)
        if name.startswith("aten._assert") or name.startswith("aten.sym_constrain"):
            graph.erase_node(node)
        elif name.startswith("aten.to.") and _is_noop_cast(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=has_effect)


def _is_noop_cast(node: fx.Node) -> bool:
    """`to` returns its very argument when nothing changes, in eager as here."""
    source, value = node.args[0], node.meta.get("val")
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    copies = node.kwargs.get("copy", False) or any(a is True for a in node.args[2:])
    return (
        isinstance(before, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and not copies
        and (before.dtype, before.device, before.layout) == (value.dtype, value.device, value.layout)
    )


def has_effect(node: fx.Node) -> bool:
    """Whether a node must stay although nobody reads it: placeholders, outputs, draws and writes."""
    if node.op in ("placeholder", "output"):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and (is_random(node) or writes(node) or _updates_stats(node))


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if any(argument.name == "philox_seed" for argument in node.target._schema.arguments):
        return False  # a backward of fused attention draws again what its forward drew, from the seed it is given
    probability = _dropout_probability(node)
    return probability is None or probability > 0


def _dropout_probability(node: fx.Node) -> float | None:
    """The probability of operators that draw only if it is above 0, None for those that always draw."""
    target: Any = node.target
    arguments: dict[str, Any] = {a.name: v for a, v in zip(target._schema.arguments, node.args)} | dict(node.kwargs)
    if arguments.get("train") is False or arguments.get("training") is False:
        return 0.0
    for name in ("dropout_p", "dropout"):
        if isinstance(arguments.get(name), (int, float)):
            return float(arguments[name])
    name = str(node.target)
    if "scaled_dot_product" in name or "_flash_attention" in name or "_efficient_attention" in name:
        return 0.0
    return None


def writes(node: fx.Node) -> bool:
    """Whether the node's schema says that it writes into an argument."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target._schema.is_mutable


def _updates_stats(node: fx.Node) -> bool:
    """batch_norm in training writes its running statistics, which its schema does not say."""
    return str(node.target).startswith(("aten.batch_norm", "aten.instance_norm"))


def _outputs(program: Any, graph: fx.Graph) -> tuple[str | tuple[Any], ...]:
    """Per leaf of the model's output the node that makes it; export lists written buffers first."""
    returned = next(n for n in graph.nodes if n.op == "output").args[0]
    leaves: list[str | tuple[Any]] = []
    for spec, value in zip(program.graph_signature.output_specs, returned):
        if spec.kind == OutputKind.USER_OUTPUT:
            leaves.append(value.name if isinstance(value, fx.Node) else (value,))
        elif spec.kind != OutputKind.BUFFER_MUTATION:
            raise CaptureError(f"the model has an output of kind {spec.kind.name}, which cannot be replayed")
    return tuple(leaves)


def _output_names(program: Any) -> tuple[str, ...]:
    spec = program.call_spec.out_spec
    skeleton = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths = [path for path, _ in pytree.tree_flatten_with_path(skeleton)[0]]
    return tuple(
        ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path) or "output"
        for path in paths
    )
