"""One block's forward and backward as one functional graph, traced as eager mode runs them.

Rule 2: the backward is what `torch.autograd.grad` runs without `create_graph`. Rule 3: a value that several blocks read
gets one leaf per use, and its gradients are added in reverse program order to those that later blocks have left in
the accumulator. Rule 4: every node runs under the grad mode and autocast region that it had in the model.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError
from ..guards.surroundings import surroundings
from ..runtime.operators.checks import CHECKS, check_flag
from ..runtime.operators.recurrent import recorded_rnn_layer, rnn_layer_backward
from ..runtime.torch_names.operators import OpOverload
from ..runtime.torch_names.tracing import (
    FunctionalTensorMode,
    from_functional,
    has_data_mutation,
    make_fx,
    to_functional,
)
from . import draws
from .as_in_eager import LayoutsKept, copied, no_autocast, run_openly
from .casts import added
from .edges import edges_into
from .effects import is_random
from .losses import overwrite_logits
from .spec import BlockSpec, Joint, LowPrecision, class_key
from .storages import let_backward_read, own_storages, settle_gradients
from .true_strides import TrueStridesMode, kernels_asked

_COPY = torch.ops.aten.copy.default
_RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
_RNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default

# Blocks of these operators alone are traced once per process. What others do may be registered anew under their names.
_LASTING = ("aten", "prims")
_MOST_KEPT = 64
_kept: dict[tuple[Any, ...], Joint] = {}


def trace(spec: BlockSpec, own_results: bool = True) -> Joint:
    """Trace one block's forward and backward, or recall the trace of one like it: a model is planned more than once.

    Parameters
    ----------
    spec: the block; its nodes' fake values are read from `meta["fake"]`.
    own_results: whether results that are views of the block's inputs get their own storage.

    Returns: the functional joint graph, split into forward and backward. It is shared, and nobody changes it.
    """
    if not all(isinstance(n.target, OpOverload) and n.target.namespace in _LASTING for n in _operators(spec)):
        return _trace(spec, own_results)
    storages = tuple(e.node.meta["fake"].untyped_storage().nbytes() for e in spec.externals)
    key = class_key(spec), storages, own_results, torch.is_grad_enabled(), surroundings(), kernels_asked()
    joint = _kept.pop(key, None) or _trace(spec, own_results)
    # The one that was asked for last stands at the end.
    _kept[key] = joint
    if len(_kept) > _MOST_KEPT:
        _kept.pop(next(iter(_kept)), None)
    return joint


def _operators(spec: BlockSpec) -> Iterator[fx.Node]:
    return (node for node in spec.nodes if node.target is not operator.getitem)


def _trace(spec: BlockSpec, own_results: bool) -> Joint:
    run = _Run(spec)
    tracer = make_fx(
        run.functional,
        {_COPY: copied, _RNN_LAYER: _rnn_layer, _RNN_BACKWARD: rnn_layer_backward, **draws.FUNCTIONAL},
        tracing_mode="real",
        _allow_non_fake_inputs=True,
    )
    module = tracer(*run.example())
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["constant"] = getattr(module, node.target)
        node.meta.setdefault("val", None)
    _drop_aliases(module.graph)
    return _split(module.graph, run, own_results)


def _rnn_layer(*arguments: Any) -> Any:
    """Record the layer for a backward if grad mode is on: the kernel reads the mode, which is off during a replay."""
    return recorded_rnn_layer(*arguments) if torch.is_grad_enabled() else NotImplemented


class _Run:
    """Runs one block under tracing; the flat argument list is leaves, tangents, accumulators."""

    def __init__(self, spec: BlockSpec) -> None:
        self.spec = spec
        self.mode = TrueStridesMode(allow_non_fake_inputs=True)
        self.n_leaves = sum(e.leaves for e in spec.externals)
        self.grads_of: list[int] = []
        self.parts: list[int] = []
        self.written: list[int] = []

    def example(self) -> list[torch.Tensor]:
        """Make fake arguments; leaves require grad where a gradient is wanted."""
        spec = self.spec
        arguments = []
        for external in spec.externals:
            like = external.node.meta["fake"]
            for _ in range(external.leaves):
                leaf = self._leaf(like, external.low)
                cast_first = external.low is not None and not external.low.copied
                arguments.append(leaf.requires_grad_(external.differentiable and not cast_first))
        arguments += [self._fake(spec.results[i].meta["fake"], stride) for i, stride in spec.tangents]
        arguments += [
            self._fake(e.node.meta["fake"], e.accumulates) for e in spec.externals if e.accumulates is not None
        ]
        return arguments

    def _leaf(self, like: Any, low: LowPrecision | None) -> torch.Tensor:
        if low is None or not low.copied:
            return self._fake(like, like.stride(), like.storage_offset(), like.untyped_storage().nbytes())
        with self.mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=low.dtype, device=like.device)

    def _fake(
        self, like: torch.Tensor, stride: tuple[int, ...], offset: int = 0, storage_bytes: int | None = None
    ) -> torch.Tensor:
        with self.mode:
            if storage_bytes is None:
                return torch.empty_strided(like.shape, stride, dtype=like.dtype, device=like.device)
            base = torch.empty(storage_bytes // like.element_size(), dtype=like.dtype, device=like.device)
            return base.as_strided(like.shape, stride, offset).detach()

    def functional(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        """Run the block on functional tensors: return results, gradients, new values of written buffers."""
        with FunctionalTensorMode(), LayoutsKept():
            wrapped = [to_functional(a) for a in arguments]
            results, grads = self._compute(wrapped)
            outputs = [from_functional(r) for r in results]
            self.grads_of = [i for i, g in enumerate(grads) if g is not None]
            outputs += [from_functional(g) for g in grads if g is not None]
            self.written = [i for i, w in enumerate(wrapped[: self.n_leaves]) if has_data_mutation(w)]
            outputs += [from_functional(wrapped[i]) for i in self.written]
        return outputs

    def _compute(self, arguments: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        spec = self.spec
        leaves = arguments[: self.n_leaves]
        tangents = arguments[self.n_leaves : self.n_leaves + len(spec.tangents)]
        accumulators = iter(arguments[self.n_leaves + len(spec.tangents) :])
        env: dict[fx.Node, Any] = {}
        per_use: dict[fx.Node, list[torch.Tensor]] = {}
        # One copy in the lower precision serves all casts inside an operator, as autocast's cache has it in eager mode.
        low = {e.node: e.rounded for e in spec.externals if e.rounded is not None and e.differentiable}
        uncast: dict[fx.Node, tuple[int, torch.dtype]] = {}
        position = 0
        for external in spec.externals:
            own = leaves[position : position + external.leaves]
            env[external.node] = own[0]
            if external.low is not None and not external.low.copied and external.differentiable:
                uncast[external.node] = position, external.low.dtype
            position += external.leaves
            if external.leaves > 1:
                per_use[external.node] = list(own)
        for node in spec.nodes:

            def value_of(n: fx.Node) -> Any:
                if n in uncast:
                    at, dtype = uncast.pop(n)
                    env[n] = leaves[at] = _cast(leaves[at], dtype)
                value = per_use[n].pop(0) if per_use.get(n) else env[n]
                return value.to(low[n]) if n in low else value

            with node.meta["region"].entered():
                args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
                env[node] = run_openly(node.target, args, kwargs)
        results = [env[n] for n in spec.results]
        grads = self._gradients(results, leaves, tangents, accumulators)
        return [r.detach() for r in results], grads

    def _gradients(self, results: Any, leaves: Any, tangents: Any, accumulators: Any) -> list[torch.Tensor | None]:
        spec = self.spec
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        given: list[torch.Tensor | None] = [None] * len(wanted)
        outputs = [results[i] for i, _ in spec.tangents]
        self.parts = edges_into(outputs, leaves)
        if outputs and wanted:
            # In eager mode the backward runs outside the user's autocast region.
            with no_autocast(), _overwriting_named():
                given = list(torch.autograd.grad(outputs, wanted, tangents, allow_unused=True))
        found = iter(given)
        position, totals = 0, []
        with torch.no_grad(), no_autocast():
            for external in spec.externals:
                own = leaves[position : position + external.leaves]
                position += external.leaves
                parts = [next(found) for leaf in own if leaf.requires_grad]
                total = next(accumulators) if external.accumulates is not None else None
                for part in reversed(parts):
                    if part is not None:
                        total = part if total is None else added(total, part, external.rounded)
                if total is not None and external.low is not None and not external.low.gradient:
                    total = total.to(external.node.meta["fake"].dtype)
                totals.append(total)
        return totals


def _cast(leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a parameter as autocast would, and let the gradient be that of the copy."""
    with torch.no_grad(), no_autocast():
        return leaf.to(dtype).requires_grad_()


@contextlib.contextmanager
def _overwriting_named() -> Iterator[None]:
    """Raise CaptureError if the backward in the body finds that the forward has overwritten what it needs."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        sentence = str(error).partition(" Hint:")[0].rstrip(".")
        raise CaptureError(
            f"the model cannot be trained; its backward fails in plain PyTorch, too: {sentence}. Let the forward make "
            "a new tensor (h = h + 1) instead of writing in place (h += 1, h.add_(1)). To see which operation needs "
            "the old values, use torch.autograd.set_detect_anomaly(True) around the plain model"
        ) from error


def _drop_aliases(graph: fx.Graph) -> None:
    """Remove detach and alias, which matter only to autograd, and dead code."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    kept = ("placeholder", "output")
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in kept or is_random(n) or n.target in CHECKS)


def _split(graph: fx.Graph, run: _Run, own_results: bool) -> Joint:
    spec = run.spec
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    output = next(n for n in graph.nodes if n.op == "output")
    returned = list(output.args[0])
    n_results, n_grads = len(spec.results), len(run.grads_of)
    leaves, position = [], 0
    owner: dict[int, int] = {}
    for index, external in enumerate(spec.externals):
        leaves.append(tuple(placeholders[position : position + external.leaves]))
        owner |= {position + k: index for k in range(external.leaves)}
        position += external.leaves
    tangents = tuple(placeholders[position : position + len(spec.tangents)])
    rest = iter(placeholders[position + len(spec.tangents) :])
    accumulators = tuple(next(rest) if e.accumulates is not None else None for e in spec.externals)
    results = returned[:n_results]
    if own_results:
        results = own_storages(graph, output, results, placeholders)
    overwrite_logits(graph, {*placeholders, *results})
    grads: list[fx.Node | None] = [None] * len(spec.externals)
    for index, node in zip(run.grads_of, returned[n_results : n_results + n_grads]):
        grads[index] = node
    settle_gradients(graph, output, spec, grads, placeholders, results)
    writes = {owner[leaf]: node for leaf, node in zip(run.written, returned[n_results + n_grads :])}
    for index in writes:
        if spec.externals[index].kind != "buffer":
            raise CaptureError(f"the model writes into {spec.externals[index].node.name}; only buffers may be written")
    let_backward_read(graph, results, writes, _forward(graph, results, writes))
    forward = _forward(graph, results, writes)
    return Joint(
        graph=graph,
        leaves=tuple(leaves),
        tangents=tangents,
        accumulators=accumulators,
        results=tuple(results),
        grads=tuple(grads),
        gradient_parts=tuple(sum(run.parts[at] for at in owner if owner[at] == i) for i in range(len(spec.externals))),
        writes=writes,
        changing=frozenset(i for i, external in enumerate(spec.externals) if external.changes),
        forward=tuple(forward),
        backward=tuple(n for n in graph.nodes if n.op == "call_function" and n not in forward),
    )


def _forward(graph: fx.Graph, results: list[fx.Node], writes: dict[int, fx.Node]) -> dict[fx.Node, None]:
    """Return the nodes that the forward runs, in order: what its results need, and all that draws or checks."""
    needed = {*results, *writes.values()} | {n for n in graph.nodes if is_random(n) or n.target is check_flag}
    for node in reversed(graph.nodes):
        if node in needed:
            needed |= set(node.all_input_nodes)
    computing = [n for n in graph.nodes if n.op == "call_function"]
    needed |= {n for n in computing if n.target is operator.getitem and n.args[0] in needed}
    needed |= {n for n in computing if n.target in CHECKS and needed.issuperset(n.all_input_nodes)}
    return dict.fromkeys(n for n in computing if n in needed)
