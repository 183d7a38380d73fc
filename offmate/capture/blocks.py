"""Specifies and traces the blocks of a chain: what each reads, where gradients flow, and which share a class."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from .captured import Captured
from .chain import Chain, written_storages
from .joint import trace
from .spec import BlockSpec, External, Joint, LowPrecision, class_key

log = logging.getLogger("offmate")


@dataclass(frozen=True)
class TracedBlock:
    """A block of the chain with its class's joint graph.

    Parameters
    ----------
    spec: what this particular block reads and hands on.
    key: the key of its class.
    joint: the class's graph; externals and results correspond by position.
    """

    spec: BlockSpec
    key: str
    joint: Joint


def trace_blocks(
    captured: Captured,
    chain: Chain,
    trainable: frozenset[str],
    incoming: Mapping[str, tuple[int, ...]],
    progress: Callable[[int, int], None] = lambda done, total: None,
    low: Mapping[str, LowPrecision] | None = None,
) -> tuple[TracedBlock, ...]:
    """Specify every block from the last to the first, tracing each class once.

    Parameters
    ----------
    trainable: placeholder names of parameters that require a gradient.
    incoming: strides of the gradients that output nodes receive from the user's backward, by the nodes' names.
    progress: called with the number of blocks done, and of all blocks.
    low: parameters that move in a lower precision, by canonical name.

    Returns: the blocks in chain order.
    """
    layout = _Layout(captured, chain, trainable, incoming, low or {})
    joints: dict[str, Joint] = {}
    traced: list[TracedBlock] = []
    for index in reversed(range(len(chain.blocks))):
        spec = layout.specify(index)
        key = class_key(spec)
        if key not in joints:
            joints[key] = trace(spec)
        layout.note_gradients(spec, joints[key])
        traced.append(TracedBlock(spec, key, joints[key]))
        progress(len(traced), len(chain.blocks))
    log.debug("%d blocks in %d classes", len(traced), len(joints))
    return tuple(reversed(traced))


class _Layout:
    """Dependences across blocks; `gradients` (strides by node) grows while blocks are traced from last to first."""

    def __init__(
        self,
        captured: Captured,
        chain: Chain,
        trainable: frozenset[str],
        incoming: Mapping[str, tuple[int, ...]],
        low: Mapping[str, LowPrecision],
    ) -> None:
        self.captured, self.low = captured, low
        self.chain = chain
        self.trainable = trainable
        self.outputs = {o for o in captured.outputs if isinstance(o, str)}
        self.resting = {s for n in captured.graph.nodes if n.op == "placeholder" for s in chain.facts[n].storages}
        self.resting |= {s for n in chain.prelude for s in chain.facts[n].storages}
        self.changing = {
            s
            for n in captured.graph.nodes
            if n.op == "call_function"
            for s in written_storages(n, captured, chain.facts)
        }
        self.nodes = [self._with_views(block) for block in chain.blocks]
        self.readers: dict[fx.Node, list[int]] = {}
        for index, nodes in enumerate(self.nodes):
            for node in self._outside(nodes):
                self.readers.setdefault(node, []).append(index)
        self.gradients = {n: incoming[n.name] for n in captured.graph.nodes if n.name in incoming}

    def _with_views(self, block: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """Return the block's nodes, preceded by the views of resting tensors that it reads from earlier blocks."""
        own = set(block)
        pulled: list[fx.Node] = []

        def pull(node: fx.Node) -> None:
            if node in own or node not in self.chain.made_in or node in pulled:
                return
            if not set(self.chain.facts[node].storages) <= self.resting or self._gathers(node):
                return
            for source in node.all_input_nodes:
                pull(source)
            pulled.append(node)

        for node in block:
            for source in node.all_input_nodes:
                pull(source)
        return (*pulled, *block)

    def _gathers(self, node: fx.Node) -> bool:
        """Return whether gradients of several blocks add up in a view of a parameter before reaching the parameter."""
        readers = {self.chain.made_in[user] for user in node.users if user in self.chain.made_in}
        return len(readers) > 1 and any(self.chain.facts[node].requires_grad)

    def _outside(self, nodes: tuple[fx.Node, ...]) -> list[fx.Node]:
        own = set(nodes)
        return list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in own))

    def specify(self, index: int) -> BlockSpec:
        nodes = self.nodes[index]
        uses: Counter[fx.Node] = Counter()
        for node in nodes:
            fx.map_arg((node.args, node.kwargs), lambda n: uses.update([n]))
        externals = tuple(self._external(node, index, uses[node]) for node in self._outside(nodes))
        own = self.chain.blocks[index]
        results = tuple(n for n in own if self._handed_on(n, index))
        tangents = tuple((i, self.gradients[n]) for i, n in enumerate(results) if n in self.gradients)
        return BlockSpec(nodes, externals, results, tangents)

    def _handed_on(self, node: fx.Node, index: int) -> bool:
        return node.name in self.outputs or any(r > index for r in self.readers.get(node, ()))

    def _external(self, node: fx.Node, index: int, uses: int) -> External:
        readers = self.readers[node]
        if node.name in self.captured.params:
            kind, differentiable = "param", node.name in self.trainable
        elif node.name in self.captured.buffers:
            kind, differentiable = "buffer", False
        elif node in self.chain.made_in:
            kind, differentiable = "value", self.chain.facts[node].requires_grad[0]
        else:
            kind, differentiable = "shared", False
        rounded = self.chain.rounded.get(node)
        split = differentiable and (len(readers) > 1 or node.name in self.outputs or rounded is not None)
        return External(
            node=node,
            kind=kind,
            leaves=uses if split else 1,
            differentiable=differentiable,
            accumulates=self.gradients.get(node) if differentiable else None,
            final=index == readers[0],
            rounded=rounded,
            changes=bool(self.changing & set(self.chain.facts[node].storages)),
            low=self.low.get(self.captured.params.get(node.name, "")),
        )

    def note_gradients(self, spec: BlockSpec, joint: Joint) -> None:
        for external, grad in zip(spec.externals, joint.grads):
            if grad is not None:
                self.gradients[external.node] = grad.meta["val"].stride()
