"""From traced and profiled blocks to plain numbers: options per class, and the problem that the solver gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ..capture.blocks import TracedBlock
from ..capture.chain import Chain
from ..capture.export import Captured
from ..capture.joint import BlockSpec, External, Joint, trace
from ..optim.rows import grid_of
from ..programs.programs import ClassGraph, NodeCost, Programs
from ..runtime.replay.program import Program
from ..solver.options.choices import BlockGraph, Op, Storage, choices
from ..solver.options.pieces import Grid, in_pieces
from ..solver.problem import Block, Group, Option, Output, Problem, Rates, Shared, Side, TensorSize, Value

# What is smaller never leaves: no budget gains by it. And fused attention keeps the few bytes of its seed in the host's
# own memory and has to find them there.
_TINY_BYTES = 512


@dataclass(frozen=True)
class LinkRates:
    """Copy rates between host and device in bytes per second; `both` is the sum of both directions at once."""

    in_bytes_per_s: float
    out_bytes_per_s: float
    both_bytes_per_s: float


@dataclass(frozen=True)
class ClassOption:
    """One option of a class: its programs, and which of the saved storages stay or leave."""

    name: str
    programs: Programs
    kept: frozenset[int]
    offloaded: frozenset[int]


@dataclass(frozen=True)
class BlockClass:
    """A class with its costs and options."""

    graph: ClassGraph
    options: tuple[ClassOption, ...]

    @cached_property
    def backward_reads(self) -> frozenset[int]:
        """Registers that the backward of any option reads."""
        return frozenset().union(*(self.graph.read_registers(o.programs.backward) for o in self.options))


@dataclass(frozen=True)
class Trainable:
    """What training a parameter takes: bytes of its optimizer state that move, and seconds on host and device.

    Parameters
    ----------
    by_rows: whether rows of it can be updated on their own.
    cpu_update_s, device_update_s: to update it. cpu_add_s, device_add_s: to add up a micro-batch's gradient.
    side: who may update it.
    """

    state_bytes: int
    by_rows: bool
    cpu_update_s: float
    device_update_s: float
    cpu_add_s: float
    device_add_s: float
    side: Side = "any"


@dataclass(frozen=True)
class Prelude:
    """What runs before the first block.

    Parameters
    ----------
    joint: its graph, None if nothing depends on no parameter.
    nodes: nodes of the flat graph that are there afterwards: batch tensors, buffers, constants and what it makes.
    item: node -> name of the shared item that holds its storage; absent for buffers and constants.
    item_bytes: bytes of each item.
    batch_bytes: bytes of each batch tensor that anybody reads, by placeholder name.
    program: its program, None without a graph.
    """

    spec: BlockSpec
    graph: ClassGraph | None
    program: Program | None
    item: dict[fx.Node, str]
    item_bytes: dict[str, int]
    batch_bytes: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """The batch and the most that the prelude holds on top."""
        return sum(self.batch_bytes.values()) + (self.program.rise_bytes if self.program else 0)


@dataclass(frozen=True)
class Lowered:
    """The model as the solver's problem, and what is needed to bind its answer back to tensors.

    Parameters
    ----------
    value_item: name of a handed-on node -> item that holds its storage, `v:...` or `o:...`.
    """

    problem: Problem
    classes: dict[str, BlockClass]
    blocks: tuple[TracedBlock, ...]
    prelude: Prelude
    value_item: dict[str, str]


def class_options(
    joint: Joint, costs: dict[str, NodeCost], link_bytes_per_s: float, max_options: int, last: bool
) -> BlockClass:
    """Solve the options of a class and build the programs of each.

    Parameters
    ----------
    costs: per node. link_bytes_per_s: at which offloaded values travel. max_options: how many to keep.
    last: whether the class's blocks have no time to offload anything (the chain's last block).
    """
    graph = ClassGraph(joint, costs)
    if not graph.wanted:
        return BlockClass(graph, (ClassOption("keep", graph.programs(frozenset()), frozenset(), frozenset()),))
    own = frozenset(graph.number.values()) - graph.resting
    forward_own = frozenset(s for n in joint.forward for s in graph.made_by(n)) & own
    found = []
    for choice in choices(_block_graph(graph), link_bytes_per_s, max_options):
        if last and choice.offload:
            continue
        programs = graph.programs(forward_own - choice.keep - choice.offload)
        worth = frozenset(s for s in programs.saved if graph.bytes[s] > _TINY_BYTES)
        offloaded = worth & choice.offload - choice.keep
        found.append(ClassOption(choice.name, programs, frozenset(programs.saved) - offloaded, offloaded))
    return BlockClass(graph, tuple(found))


def _block_graph(graph: ClassGraph) -> BlockGraph:
    ops = []
    for node in graph.joint.forward:
        makes = tuple(s for s in graph.made_by(node) if s not in graph.resting)
        if not graph.made_by(node):
            continue
        reads = tuple(sorted({s for a in node.all_input_nodes for s in graph.storages(a)} - set(makes)))
        seconds = graph.costs.get(node.name, NodeCost()).seconds
        ops.append(Op(node.name, seconds, reads, makes, node in graph.recomputable))
    own = {s for op in ops for s in op.makes}
    storages = tuple(Storage(graph.bytes[s], s not in own) for s in range(len(graph.number)))
    return BlockGraph(tuple(ops), storages, graph.wanted & own)


def option_numbers(option: ClassOption, incoming_bytes: int) -> Option:
    """The solver's view of an option.

    Parameters
    ----------
    incoming_bytes: gradients that the backward is handed and lets go.
    """
    programs = option.programs
    saved = sum(programs.saved_bytes[s] for s in option.kept)
    offloaded = sum(programs.saved_bytes[s] for s in option.offloaded)
    return Option(
        name=option.name,
        saved_bytes=saved,
        offloaded_bytes=offloaded,
        forward_s=programs.forward.seconds,
        backward_s=programs.backward.seconds,
        forward_peak_bytes=programs.forward.rise_bytes,
        backward_peak_bytes=programs.backward.rise_bytes + saved + offloaded + incoming_bytes,
    )


def lower_prelude(
    captured: Captured,
    chain: Chain,
    blocks: tuple[TracedBlock, ...],
    costs: dict[str, NodeCost] | None = None,
) -> Prelude:
    """Trace what depends on no parameter, and find which storages outlive it."""
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


class Lowering:
    """Builds the problem; everything it reads is frozen.

    Parameters
    ----------
    outputs: names of the nodes that the model returns. differentiated: those into which the user hands a gradient.
    trainable: per canonical parameter name what training it takes.
    """

    def __init__(
        self,
        captured: Captured,
        chain: Chain,
        blocks: tuple[TracedBlock, ...],
        classes: dict[str, BlockClass],
        prelude: Prelude,
        differentiated: frozenset[str],
        trainable: dict[str, Trainable],
    ) -> None:
        self.captured, self.chain, self.blocks, self.classes = captured, chain, blocks, classes
        self.prelude, self.differentiated, self.trainable = prelude, differentiated, trainable
        self.n = len(blocks)
        self.outputs = {o for o in captured.outputs if isinstance(o, str)}
        self.graphs = [classes[b.key].graph for b in blocks]
        self.reads = [classes[b.key].backward_reads for b in blocks]

    def backward_step(self, block: int) -> int:
        return 2 * self.n - 1 - block

    def problem(self, rates: LinkRates, shared_cores: bool, **budgets: Any) -> Lowered:
        """The problem. budgets: the remaining fields of `Problem`."""
        values, outputs, value_item = self._values()
        blocks = tuple(
            Block(
                name=f"{i}",
                options=tuple(option_numbers(o, self._incoming_bytes(i)) for o in self.classes[b.key].options),
            )
            for i, b in enumerate(self.blocks)
        )
        problem = Problem(
            blocks=blocks,
            groups=self._groups(),
            values=values,
            shared=self._shared(budgets["turn_around_steps"]),
            outputs=outputs,
            rates=Rates(rates.in_bytes_per_s, rates.out_bytes_per_s, rates.both_bytes_per_s, shared_cores=shared_cores),
            start_peak_bytes=self.prelude.peak_bytes,
            **budgets,
        )
        return Lowered(problem, self.classes, self.blocks, self.prelude, value_item)

    def _incoming_bytes(self, index: int) -> int:
        graph, joint = self.graphs[index], self.blocks[index].joint
        return sum(graph.bytes[s] for t in joint.tangents for s in graph.storages(t))

    def _uses(self, node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Steps whose compute reads a node, and backward steps that make a part of its gradient."""
        uses, grads = set(), set()
        for index, (block, graph) in enumerate(zip(self.blocks, self.graphs)):
            for external, leaves, grad in zip(block.spec.externals, block.joint.leaves, block.joint.grads):
                if external.node is not node:
                    continue
                uses.add(index)
                if any(graph.register[leaf] in self.reads[index] for leaf in leaves):
                    uses.add(self.backward_step(index))
                if grad is not None:
                    grads.add(self.backward_step(index))
            for own, result in zip(block.spec.results, block.joint.results):
                if own is node and graph.register[result] in self.reads[index]:
                    uses.add(self.backward_step(index))
        return tuple(sorted(uses)), tuple(sorted(grads))

    def _values(self) -> tuple[tuple[Value, ...], tuple[Output, ...], dict[str, str]]:
        values: list[Value] = []
        outputs: list[Output] = []
        value_item: dict[str, str] = {}
        for index, (block, graph) in enumerate(zip(self.blocks, self.graphs)):
            together: dict[int, list[fx.Node]] = {}
            for node, result in zip(block.spec.results, block.joint.results):
                together.setdefault(graph.storages(result)[0], []).append(node)
            for storage, nodes in together.items():
                returned = [n for n in nodes if n.name in self.outputs]
                kind = "o" if returned else "v"
                value_item |= {n.name: f"{kind}:{(returned or nodes)[0].name}" for n in nodes}
                size = graph.bytes[storage]
                if returned:
                    outputs += self._outputs_of(returned, index, size)
                values += self._values_of(nodes, index, 0 if returned else size)
        return tuple(values), tuple(outputs), value_item

    def _outputs_of(self, nodes: list[fx.Node], index: int, size: int) -> list[Output]:
        """Outputs on one storage: the first holds its bytes."""
        return [Output(n.name, size if n is nodes[0] else 0, index, self._user_gradient_bytes(n)) for n in nodes]

    def _user_gradient_bytes(self, node: fx.Node) -> int:
        return _dense_bytes(node.meta["fake"]) if node.name in self.differentiated else 0

    def _values_of(self, nodes: list[fx.Node], index: int, size: int) -> list[Value]:
        """Values on one storage: the first holds its bytes and is used wherever one of them is."""
        found = []
        all_uses = {u for n in nodes for u in self._uses(n)[0]}
        for node in nodes:
            uses, grads = self._uses(node)
            amount = size if node is nodes[0] else 0
            uses = tuple(sorted(all_uses)) if amount else uses
            if not uses:
                continue
            own_gradient = grads and not self._user_gradient_bytes(node)
            # A value that is an output too shares its storage with it, and needs a name of its own.
            name = f"{node.name}~" if node.name in self.outputs else node.name
            gradient_bytes = _dense_bytes(node.meta["fake"]) if own_gradient else 0
            found.append(Value(name, amount, index, uses, gradient_bytes, grads if own_gradient else ()))
        return found

    def _groups(self) -> tuple[Group, ...]:
        members: dict[tuple[Any, ...], list[tuple[TensorSize, Trainable]]] = {}
        grids: dict[str, Grid] = {}
        nothing = Trainable(0, False, 0.0, 0.0, 0.0, 0.0)
        for node in self.captured.graph.nodes:
            if node.name not in self.captured.params:
                continue
            uses, grads = self._uses(node)
            if not uses:
                continue
            name, fake = self.captured.params[node.name], node.meta["fake"]
            training = self.trainable.get(name, nothing) if grads else nothing
            # An update needs the parameter where the last part of its gradient is made.
            uses = tuple(sorted({*uses, *grads[-1:]}))
            grid = grid_of(fake) if training.by_rows else None
            grids |= {name: grid} if grid else {}
            nbytes = _dense_bytes(fake)
            size = TensorSize(name, nbytes, nbytes if grads else 0, training.state_bytes)
            members.setdefault((uses, grads, fake.dtype, training.side), []).append((size, training))
        groups = (
            Group(
                name=tensors[0][0].name,
                tensors=tuple(size for size, _ in tensors),
                uses=uses,
                grad_steps=grads,
                cpu_update_s=sum(t.cpu_update_s for _, t in tensors),
                device_update_s=sum(t.device_update_s for _, t in tensors),
                cpu_add_s=sum(t.cpu_add_s for _, t in tensors),
                device_add_s=sum(t.device_add_s for _, t in tensors),
                side=side,
            )
            for (uses, grads, _, side), tensors in members.items()
        )
        return in_pieces(groups, grids)

    def _shared(self, turn_around_steps: int) -> tuple[Shared, ...]:
        last: dict[str, int] = dict.fromkeys(self.prelude.item_bytes, 0)
        for index, (block, graph) in enumerate(zip(self.blocks, self.graphs)):
            for external, leaves in zip(block.spec.externals, block.joint.leaves):
                name = self.prelude.item.get(external.node)
                if name is None:
                    continue
                later = any(graph.register[leaf] in self.reads[index] for leaf in leaves)
                last[name] = max(last[name], self.backward_step(index) if later else index)
        for node, name in self.prelude.item.items():
            if node.name in self.outputs:
                last[name] = 2 * self.n + turn_around_steps - 1
        return tuple(Shared(name, size, last[name]) for name, size in self.prelude.item_bytes.items())
