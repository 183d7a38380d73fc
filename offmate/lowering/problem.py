"""Turns traced and profiled blocks into plain numbers: the problem for the solver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..capture.blocks import TracedBlock
from ..capture.captured import Captured
from ..capture.chain import Chain
from ..capture.spec import LowPrecision, span_bytes
from ..machines.links import LinkRates
from ..optim.rows import grid_of
from ..programs.prelude import Prelude, _dense_bytes
from ..solver import items
from ..solver.items import Item
from ..solver.options.pieces import Grid, in_pieces
from ..solver.problem import Block, Group, Output, Problem, Rates, Shared, Side, TensorSize, Value, update_steps
from ..solver.steps import Direction, steps_of
from .float32_copies import tier_of
from .frozen_files import FrozenFiles
from .options import BlockClass, option_numbers
from .state_files import StateFiles

_PAGE_ELEMENTS = 2048  # of two bytes in 4,096, so that pieces of states begin where disks can be written
_WITHOUT_GATE = 3  # turn-around steps where updates need not wait for the last gradient


@dataclass(frozen=True)
class Trainable:
    """The cost of training a parameter: bytes of its optimizer state that move, and seconds on host and device.

    Parameters
    ----------
    by_rows: whether its rows can be updated separately. by_rows_on_host: whether the host can do so, too.
    cpu_update_s, device_update_s: seconds to update it. cpu_add_s, device_add_s: to add a micro-batch's gradient.
    side: which side may update it. cpu_norm_s, device_norm_s: seconds to unscale its gradient and to take its norm, as
        far as scaling and clipping ask for it.
    cpu_log_s: seconds that an update on the host takes longer if it keeps a log of the old values.
    has_copy: whether its state has a float32 copy of it, of which it is the rounded value after every update.
    """

    state_bytes: int
    by_rows: bool
    cpu_update_s: float
    device_update_s: float
    cpu_add_s: float
    device_add_s: float
    side: Side = "any"
    cpu_norm_s: float = 0.0
    device_norm_s: float = 0.0
    cpu_log_s: float = 0.0
    by_rows_on_host: bool = True
    has_copy: bool = False

    def add_s(self, micro_batches: int) -> tuple[float, float]:
        """Return the seconds of an addition on the host, and on the device, a share of the total's norm included.

        It is taken with the last addition. The host's first is counted though it only receives the total.
        """
        shares = micro_batches, max(1, micro_batches - 1)
        norms = (norm_s / share for norm_s, share in zip((self.cpu_norm_s, self.device_norm_s), shares))
        cpu_s, device_s = (add + norm for add, norm in zip((self.cpu_add_s, self.device_add_s), norms))
        return cpu_s, device_s


@dataclass(frozen=True)
class Lowered:
    """The model as the solver's problem, with everything needed to bind the answer back to tensors.

    Parameters
    ----------
    value_item: name of a node that a block hands on -> item that holds its storage, `v:...` or `o:...`.
    """

    problem: Problem
    classes: dict[str, BlockClass]
    blocks: tuple[TracedBlock, ...]
    prelude: Prelude
    value_item: dict[str, Item]


class Lowering:
    """Builds the problem; everything it reads is frozen.

    Parameters
    ----------
    incoming: strides of the gradients that output nodes receive from the user, by the nodes' names.
    trainable: the cost of training, per canonical parameter name. files: of frozen parameters; None without any.
    storage: files that states and activations may leave to; None without any. low: parameters that move in a lower
        precision.
    """

    def __init__(
        self,
        captured: Captured,
        chain: Chain,
        blocks: tuple[TracedBlock, ...],
        classes: dict[str, BlockClass],
        prelude: Prelude,
        incoming: Mapping[str, tuple[int, ...]],
        trainable: dict[str, Trainable],
        files: FrozenFiles | None = None,
        storage: StateFiles | None = None,
        low: Mapping[str, LowPrecision] | None = None,
    ) -> None:
        self.captured, self.chain, self.blocks, self.classes = captured, chain, blocks, classes
        self.prelude, self.incoming, self.trainable, self.files = prelude, incoming, trainable, files
        self.storage, self.low = storage, low or {}
        steps = steps_of(len(blocks), micro_batches=1, turn_around_steps=0)
        backwards = ((n, step) for n, step in enumerate(steps) if step.direction is Direction.BACKWARD)
        self.backward = {step.block: number for number, step in backwards}
        self.one_pass = len(steps)
        self.outputs = {o for o in captured.outputs if isinstance(o, str)}
        self.graphs = [classes[b.key].graph for b in blocks]
        self.reads = [classes[b.key].backward_reads for b in blocks]

    def problem(
        self,
        rates: LinkRates,
        shared_cores: bool,
        *,
        turn_around_steps: int | None,
        gate: bool = False,
        together: bool = False,
        **budgets: Any,
    ) -> Lowered:
        """Build the problem.

        Parameters
        ----------
        turn_around_steps: None for as many as the updates need. together: whether the micro-batches of an update run
            block by block. budgets: the remaining fields of `Problem`.
        """
        values, outputs, value_item = self._values()
        blocks = tuple(
            Block(
                name=f"{i}",
                options=tuple(option_numbers(o, self._incoming_bytes(i)) for o in self.classes[b.key].options),
            )
            for i, b in enumerate(self.blocks)
        )
        groups = self._groups(budgets.get("micro_batches", 1), together)
        if turn_around_steps is None:
            turn_around_steps = update_steps(groups, budgets["device_budget_bytes"]) if gate else _WITHOUT_GATE
        problem = Problem(
            blocks=blocks,
            groups=groups,
            values=values,
            shared=self._shared(turn_around_steps),
            outputs=outputs,
            rates=Rates(
                rates.in_bytes_per_s,
                rates.out_bytes_per_s,
                rates.both_bytes_per_s,
                rates.manage_s,
                shared_cores=shared_cores,
                per_copy_s=rates.per_copy_s,
                **_host_memory(rates, groups, shared_cores),
            ),
            start_peak_bytes=self.prelude.peak_bytes,
            turn_around_steps=turn_around_steps,
            gate=gate,
            **budgets,
        )
        tiers = [one.tier for one in (self.files, self.storage) if one is not None]
        copies = tier_of(groups, shared_cores)
        tiers += [copies] if copies is not None else []
        if tiers:
            problem = replace(problem, rates=replace(problem.rates, tiers=tuple(tiers)))
        return Lowered(problem, self.classes, self.blocks, self.prelude, value_item)

    def _incoming_bytes(self, index: int) -> int:
        graph, joint = self.graphs[index], self.blocks[index].joint
        return sum(graph.bytes[s] for t in joint.tangents for s in graph.storages(t))

    def _uses(self, node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the steps whose compute reads a node, and the backward steps that make a part of its gradient."""
        uses, grads = set(), set()
        for index, (block, graph) in enumerate(zip(self.blocks, self.graphs)):
            for external, leaves, grad in zip(block.spec.externals, block.joint.leaves, block.joint.grads):
                if external.node is not node:
                    continue
                uses.add(index)
                if any(graph.register[leaf] in self.reads[index] for leaf in leaves):
                    uses.add(self.backward[index])
                if grad is not None:
                    grads.add(self.backward[index])
            for own, result in zip(block.spec.results, block.joint.results):
                if own is node and graph.register[result] in self.reads[index]:
                    uses.add(self.backward[index])
        return tuple(sorted(uses)), tuple(sorted(grads))

    def _values(self) -> tuple[tuple[Value, ...], tuple[Output, ...], dict[str, Item]]:
        values: list[Value] = []
        outputs: list[Output] = []
        value_item: dict[str, Item] = {}
        for index, (block, graph) in enumerate(zip(self.blocks, self.graphs)):
            together: dict[int, list[fx.Node]] = {}
            for node, result in zip(block.spec.results, block.joint.results):
                together.setdefault(graph.storages(result)[0], []).append(node)
            for storage, nodes in together.items():
                returned = [n for n in nodes if n.name in self.outputs]
                item = items.output(returned[0].name) if returned else items.value(nodes[0].name)
                value_item |= {n.name: item for n in nodes}
                size = graph.bytes[storage]
                if returned:
                    outputs += self._outputs_of(returned, index, size)
                values += self._values_of(nodes, index, 0 if returned else size)
        return tuple(values), tuple(outputs), value_item

    def _outputs_of(self, nodes: list[fx.Node], index: int, size: int) -> list[Output]:
        """Build the outputs on one storage: the first holds its bytes."""
        return [Output(n.name, size if n is nodes[0] else 0, index, self._user_gradient_bytes(n)) for n in nodes]

    def _user_gradient_bytes(self, node: fx.Node) -> int:
        return span_bytes(node.meta["fake"], self.incoming[node.name]) if node.name in self.incoming else 0

    def _gradient_bytes(self, node: fx.Node) -> int:
        """Return the bytes of a value's gradient: one that is made in one block keeps its repeats and gaps."""
        return max(
            graph.bytes[graph.storages(grad)[0]]
            for block, graph in zip(self.blocks, self.graphs)
            for external, grad in zip(block.spec.externals, block.joint.grads)
            if external.node is node and grad is not None
        )

    def _values_of(self, nodes: list[fx.Node], index: int, size: int) -> list[Value]:
        """Build the values on one storage: the first holds its bytes and is used wherever any of them is."""
        found = []
        all_uses = {u for n in nodes for u in self._uses(n)[0]}
        for node in nodes:
            uses, grads = self._uses(node)
            amount = size if node is nodes[0] else 0
            uses = tuple(sorted(all_uses)) if amount else uses
            if not uses:
                continue
            own_gradient = grads and not self._user_gradient_bytes(node)
            # A value that is also an output shares the output's storage, and needs another name.
            name = f"{node.name}~" if node.name in self.outputs else node.name
            gradient_bytes = self._gradient_bytes(node) if own_gradient else 0
            found.append(Value(name, amount, index, uses, gradient_bytes, grads if own_gradient else ()))
        return found

    def _groups(self, micro_batches: int, together: bool) -> tuple[Group, ...]:
        members: dict[tuple[Any, ...], list[tuple[TensorSize, Trainable]]] = {}
        grids: dict[str, Grid] = {}
        may_be_cast = self.storage is not None and self.storage.for_parameters
        nothing = Trainable(0, False, 0.0, 0.0, 0.0, 0.0)
        for node in self.captured.graph.nodes:
            if node.name not in self.captured.params:
                continue
            uses, grads = self._uses(node)
            if not uses:
                continue
            name, fake = self.captured.params[node.name], node.meta["fake"]
            training = self.trainable.get(name, nothing) if grads else nothing
            grid = grid_of(fake, _PAGE_ELEMENTS if self.storage is not None else 1) if training.by_rows else None
            grids |= {name: grid} if grid else {}
            low, whole_bytes = self.low.get(name), _dense_bytes(fake)
            low_bytes = whole_bytes if low is None else whole_bytes * low.dtype.itemsize // fake.dtype.itemsize
            param_bytes = low_bytes if low is not None and low.copied else whole_bytes
            grad_bytes = low_bytes if low is not None and low.gradient else whole_bytes
            size = TensorSize(name, param_bytes, grad_bytes if grads else 0, training.state_bytes)
            in_files = self.files is not None and not grads and name in self.files.names
            kind = uses, grads, (fake.dtype, low), training.side, in_files
            members.setdefault(kind, []).append((size, training))
        groups = (
            Group(
                name=tensors[0][0].name,
                tensors=tuple(size for size, _ in tensors),
                uses=uses,
                grad_steps=grads,
                cpu_update_s=sum(t.cpu_update_s for _, t in tensors),
                device_update_s=sum(t.device_update_s for _, t in tensors),
                cpu_add_s=sum(t.add_s(micro_batches)[0] for _, t in tensors),
                # Where micro-batches run together, norms are taken apart from additions.
                device_add_s=sum(t.device_add_s if together else t.add_s(micro_batches)[1] for _, t in tensors),
                side=side,
                norm_s=sum(t.device_norm_s for _, t in tensors) if micro_batches == 1 else 0.0,
                in_files=in_files,
                cpu_log_s=sum(t.cpu_log_s for _, t in tensors),
                in_pieces_on_host=all(t.by_rows_on_host or not t.by_rows for _, t in tensors),
                # What is cast lies in files, for whoever reads it.
                has_copies=may_be_cast and bool(grads) and all(t.has_copy for _, t in tensors),
            )
            for (uses, grads, _, side, in_files), tensors in members.items()
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
                last[name] = max(last[name], self.backward[index] if later else index)
        for node, name in self.prelude.item.items():
            if node.name in self.outputs:
                last[name] = self.one_pass + turn_around_steps - 1
        return tuple(Shared(name, size, last[name]) for name, size in self.prelude.item_bytes.items())


def _host_memory(rates: LinkRates, groups: Sequence[Group], shared_cores: bool) -> dict[str, Any]:
    """Return the limit of the host's memory, and what updates take of it, as fields of `Rates`.

    Where the device shares the host's cores, these are what is short, and they are counted already.
    """
    if not rates.host_memory_bytes_per_s or shared_cores:
        return {}
    updated = [group for group in groups if group.cpu_update_s]
    seconds = sum(group.cpu_update_s for group in updated)
    moved = sum(group.host_update_bytes for group in updated)
    return {
        "host_memory_bytes_per_s": rates.host_memory_bytes_per_s,
        "worker_bytes_per_s": moved / seconds if seconds else 0.0,
    }
