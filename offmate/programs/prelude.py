"""The prelude, which runs before the first block: the batch's arrival, and everything that depends on no parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ..capture.blocks import TracedBlock
from ..capture.captured import Captured
from ..capture.chain import Chain
from ..capture.joint import trace
from ..capture.spec import BlockSpec, External
from ..runtime.replay.program import BlockProgram
from .programs import ClassGraph, NodeCost


@dataclass(frozen=True)
class Prelude:
    """The work before the first block.

    Parameters
    ----------
    spec: its nodes, inputs and results in the flat graph.
    graph: its graph, None if there are no operators that depend on no parameter.
    program: its program, None without a graph.
    item: node -> name of the shared item that holds its storage; absent for buffers and constants.
    item_bytes: bytes of each item.
    batch_bytes: bytes of each batch tensor that is read at all, by placeholder name.
    """

    spec: BlockSpec
    graph: ClassGraph | None
    program: BlockProgram | None
    item: dict[fx.Node, str]
    item_bytes: dict[str, int]
    batch_bytes: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """The bytes of the batch, plus the most that the prelude holds on top of it."""
        return sum(self.batch_bytes.values()) + (self.program.rise_bytes if self.program else 0)


def lower_prelude(
    captured: Captured,
    chain: Chain,
    blocks: tuple[TracedBlock, ...],
    costs: dict[str, NodeCost] | None = None,
) -> Prelude:
    """Trace the operators that depend on no parameter, and find which storages outlive them."""
    outputs = {o for o in captured.outputs if isinstance(o, str)}
    wanted = {e.node for b in blocks for e in b.spec.externals if e.kind == "shared"}
    wanted |= {n for n in captured.graph.nodes if n.name in outputs and n not in chain.made_in}
    own = set(chain.prelude)
    outside = list(dict.fromkeys(a for n in chain.prelude for a in n.all_input_nodes if a not in own))
    externals = tuple(External(node=n, kind="buffer" if n.name in captured.buffers else "shared") for n in outside)
    results = tuple(n for n in chain.prelude if n in wanted)
    spec = BlockSpec(chain.prelude, externals, results, ())
    inputs = {name for name in captured.inputs if name is not None}
    read = {n for n in captured.graph.nodes if n.name in inputs and (n in wanted or n in set(outside))}
    # A batch keeps its strides, which may leave gaps or repeat elements.
    batch_bytes = {n.name: n.meta["fake"].untyped_storage().nbytes() for n in captured.graph.nodes if n in read}
    item: dict[fx.Node, str] = {n: n.name for n in captured.graph.nodes if n in wanted and n.name in inputs}
    item_bytes = {name: batch_bytes[name] for name in item.values()}
    if not chain.prelude:
        return Prelude(spec, None, None, item, item_bytes, batch_bytes)
    joint = trace(spec, own_results=False)
    graph = ClassGraph(joint, costs)
    roots = {s: e.node for e, leaves in zip(externals, joint.leaves) for s in graph.storages(leaves[0])}
    owner: dict[int, str] = {}
    for node, result in zip(results, joint.results):
        storage = graph.storages(result)[0]
        root = roots.get(storage)
        if root is not None and root.name not in inputs:
            continue
        name = root.name if root is not None else owner.setdefault(storage, node.name)
        item[node] = name
        item_bytes[name] = batch_bytes[name] if root is not None else graph.bytes[storage]
    let_go = frozenset(s for s, n in roots.items() if n.name in inputs and n.name not in item_bytes)
    return Prelude(spec, graph, graph.start_program(let_go), item, item_bytes, batch_bytes)


def _dense_bytes(fake: torch.Tensor) -> int:
    return fake.numel() * fake.element_size()
