"""Builds programs from a traced block class: forward and backward for one choice of what is recomputed."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ..capture.effects import is_random
from ..capture.spec import Joint, storages_of
from ..runtime.replay.program import BlockProgram, Instruction, Slot
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.tensors import storage_key


@dataclass(frozen=True)
class NodeCost:
    """The cost of one operator.

    Parameters
    ----------
    seconds: on the device.
    workspace_bytes: bytes that its kernel holds beyond its results while it runs.
    storage_bytes: bytes of the storage behind each tensor of its result, if the kernel reserves others than the result
        needs (such as a loss that is reduced in place); otherwise empty.
    launch_s: seconds of the host until the operator is launched, with those of the replay; 0 if the device is the host.
    """

    seconds: float = 0.0
    workspace_bytes: int = 0
    storage_bytes: tuple[int, ...] = ()
    launch_s: float = 0.0


@dataclass(frozen=True)
class Programs:
    """A block class's forward and backward for one choice.

    Parameters
    ----------
    saved: storages that the forward leaves for the backward: storage number -> registers that view it.
    saved_bytes: their bytes. Which of them stay on the device and which leave is not the programs' concern.
    recomputed: how many operators of the forward the backward runs again, views not counted.
    """

    forward: BlockProgram
    backward: BlockProgram
    saved: dict[int, tuple[int, ...]]
    saved_bytes: dict[int, int]
    recomputed: int


class ClassGraph:
    """A joint graph with numbered storages and registers, from which programs and options are built.

    A storage number stands for one storage made by one operator, or given from outside.

    Parameters
    ----------
    joint: the class's graph.
    costs: seconds and workspace by node name; nodes that are missing cost nothing.
    """

    def __init__(self, joint: Joint, costs: dict[str, NodeCost] | None = None) -> None:
        self.joint = joint
        self.costs = costs or {}
        self.number: dict[int, int] = {}
        self.bytes: dict[int, int] = {}
        self.maker: dict[int, fx.Node] = {}
        # Every program of every option asks for these.
        self._behind: dict[fx.Node, tuple[int, ...]] = {}
        self._made: dict[fx.Node, tuple[int, ...]] = {}
        self._called: dict[fx.Node, tuple[Any, ...]] = {}
        self.register = {n: i for i, n in enumerate(joint.graph.nodes)}
        for node in joint.graph.nodes:
            self._note(node)
        leaves = [leaf for group in joint.leaves for leaf in group]
        self.external = frozenset(self._storages(leaves))
        self.results = frozenset(self._storages(joint.results))
        self.written = frozenset(self._storages(joint.writes.values()))
        self.constant = frozenset(self._storages(n for n in joint.graph.nodes if n.op == "get_attr"))

    def _note(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        values = node.meta["val"] if isinstance(node.meta.get("val"), (tuple, list)) else [node.meta.get("val")]
        storages = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
        reserved = self.costs.get(node.name, NodeCost()).storage_bytes or tuple(s.nbytes() for s in storages)
        for storage, nbytes in zip(storages, reserved, strict=True):
            if storage_key(storage) not in self.number and (viewed := self._viewed(node)) is not None:
                self.number[storage_key(storage)] = viewed
            if storage_key(storage) not in self.number:
                number = self.number[storage_key(storage)] = len(self.bytes)
                self.bytes[number] = nbytes
                self.maker[number] = node

    def _viewed(self, node: fx.Node) -> int | None:
        """Return the storage that a node views, of which the trace may have given it another one; None for no view."""
        if node.target is operator.getitem:
            source: Any = node.args[0]
            values, index = source.meta["val"], int(node.args[1])  # type: ignore[arg-type]
            return self.storages(source)[sum(isinstance(value, torch.Tensor) for value in values[:index])]
        # A Python number among the arguments is no node: the conjugate of 1j has memory of its own.
        sources = node.all_input_nodes if getattr(node.target, "is_view", False) else []
        return self.storages(sources[0])[0] if sources else None

    def _storages(self, nodes: Iterable[fx.Node]) -> set[int]:
        return {s for n in nodes for s in self.storages(n)}

    def storages(self, node: fx.Node) -> tuple[int, ...]:
        """Return the numbers of the storages behind a node's value."""
        found = self._behind.get(node)
        if found is None:
            found = self._behind[node] = tuple(self.number[s] for s in storages_of(node))
        return found

    def made_by(self, node: fx.Node) -> tuple[int, ...]:
        """Return the storages that the node's operator allocates."""
        found = self._made.get(node)
        if found is None:
            found = self._made[node] = tuple(s for s in self.storages(node) if self.maker[s] is node)
        return found

    @cached_property
    def resting(self) -> frozenset[int]:
        """Storages that the backward finds whatever the choice: the block's inputs, results, writes and constants."""
        return self.external | self.results | self.written | self.constant

    @cached_property
    def recomputable(self) -> frozenset[fx.Node]:
        """Forward nodes that may run again: they draw nothing, and read no buffer that a block writes."""
        buffers = {s for i in self.joint.changing for leaf in self.joint.leaves[i] for s in self.storages(leaf)}
        return frozenset(
            n
            for n in self.joint.forward
            if not is_random(n) and not any(buffers & set(self.storages(a)) for a in n.all_input_nodes)
        )

    @cached_property
    def wanted(self) -> frozenset[int]:
        """The forward's own storages that the backward reads."""
        forward = set(self.joint.forward)
        read = {a for n in self.joint.backward for a in n.all_input_nodes if a in forward}
        read |= {g for g in self.joint.grads if g in forward}
        return frozenset(self._storages(read) - self.resting)

    def programs(self, recomputed: frozenset[int]) -> Programs:
        """Build the programs in which `recomputed` storages are made again and all other wanted ones are saved."""
        order, saved = self._backward_order(self._whole_operators(recomputed))
        views: dict[int, list[int]] = {}
        for node in sorted(saved, key=self.register.__getitem__):
            for storage in set(self.storages(node)) - self.resting:
                views.setdefault(storage, []).append(self.register[node])
        handed = {*self.joint.results, *self.joint.writes.values()}
        kept = frozenset(views) | self.results | self.written
        forward = self._program(list(self.joint.forward), frozenset(), kept, frozenset(), saved | handed)
        tangents = [*self.joint.tangents, *(a for a in self.joint.accumulators if a is not None)]
        given = frozenset(views) | frozenset(self._storages(tangents))
        ends = {g for g in self.joint.grads if g is not None}
        backward = self._program(order, given, frozenset(self._storages(ends)), self.resting, ends)
        return Programs(
            forward=forward,
            backward=backward,
            saved={s: tuple(r) for s, r in views.items()},
            saved_bytes={s: self.bytes[s] for s in views},
            recomputed=sum(bool(self.made_by(n)) for n in set(order) & set(self.joint.forward)),
        )

    def _whole_operators(self, recomputed: frozenset[int]) -> frozenset[int]:
        """Extend a choice to whole operators: one that runs again makes all its storages; one that draws never runs."""
        makers = {self.maker[s] for s in recomputed} & self.recomputable
        return frozenset(s for m in makers for s in self.made_by(m)) - self.results - self.written

    def _backward_order(self, recomputed: frozenset[int]) -> tuple[list[fx.Node], set[fx.Node]]:
        """Return the backward's nodes, each recomputed one just before its first use, and the nodes read as saved."""
        forward = set(self.joint.forward)
        # A written buffer holds its new value when the backward starts, as in eager mode.
        results = {*self.joint.results, *self.joint.writes.values()}
        there: set[fx.Node] = set()
        saved: set[fx.Node] = set()
        order: list[fx.Node] = []

        def ensure(node: fx.Node) -> None:
            if node in there or node not in forward:
                return
            there.add(node)
            if node in results:
                saved.add(node)
                return
            own = [s for s in self.storages(node) if s not in self.external and s not in self.constant]
            if own and not set(own) & recomputed and not (set(own) & (self.results | self.written)):
                saved.add(node)
                return
            for source in node.all_input_nodes:
                ensure(source)
            order.append(node)

        for node in self.joint.backward:
            for source in node.all_input_nodes:
                ensure(source)
            order.append(node)
        for grad in self.joint.grads:
            if grad is not None:
                ensure(grad)
        return order, saved

    def _program(
        self,
        order: list[fx.Node],
        given: frozenset[int],
        keep: frozenset[int],
        untracked: frozenset[int],
        keep_nodes: set[fx.Node],
    ) -> BlockProgram:
        """Build the instructions for `order`.

        Parameters
        ----------
        given: storages that exist at the start, and end after their last reader.
        keep: storages that outlive the program, as do the registers of `keep_nodes`.
        untracked: storages of which another copy exists already; if an operator makes them again, nothing reads them.
        """
        running = [n for n in order if n.target is not operator.getitem]
        picked: dict[fx.Node, list[fx.Node]] = {}
        for node in order:
            if node.target is operator.getitem:
                picked.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]
        last_use = dict.fromkeys(given, -1)
        last_read: dict[fx.Node, int] = {}
        for i, node in enumerate(running):
            last_use |= dict.fromkeys(self.made_by(node), i)
            last_read |= dict.fromkeys([node, *picked.get(node, ())], i)
        for i, node in enumerate(running):
            for source in node.all_input_nodes:
                last_read[source] = i
                last_use |= {s: i for s in self.storages(source) if s in last_use and s not in untracked}
        ends: dict[int, list[int]] = {}
        for storage, i in last_use.items():
            if storage not in keep:
                ends.setdefault(max(i, 0), []).append(storage)
        clears: dict[int, list[int]] = {}
        for node, i in last_read.items():
            if node not in keep_nodes and node.op != "get_attr":
                clears.setdefault(i, []).append(self.register[node])
        instructions = tuple(
            self._instruction(n, picked.get(n), clears.get(i, []), ends.get(i, [])) for i, n in enumerate(running)
        )
        rise, net = _rise(instructions, self.bytes)
        costs = [self.costs.get(n.name, NodeCost()) for n in running]
        return BlockProgram(
            n_registers=len(self.register),
            instructions=instructions,
            given={s: self.bytes[s] for s in given},
            rise_bytes=rise,
            net_bytes=net,
            seconds=sum(cost.seconds for cost in costs),
            launch_s=sum(cost.launch_s for cost in costs),
        )

    def start_program(self, let_go: frozenset[int]) -> BlockProgram:
        """Build the program of a graph without backward; storages in `let_go` end after their last reader."""
        kept = frozenset(self.number.values()) - let_go
        made = frozenset(s for n in self.joint.forward for s in self.made_by(n))
        return self._program(
            list(self.joint.forward), let_go, (kept - made) | self.results, frozenset(), set(self.joint.results)
        )

    def read_registers(self, program: BlockProgram) -> frozenset[int]:
        """Return the registers that a program's instructions read."""
        slots = (leaf for i in program.instructions for leaf in pytree.tree_leaves((i.args, i.kwargs)))
        return frozenset(slot.index for slot in slots if isinstance(slot, Slot))

    def _instruction(
        self, node: fx.Node, picked: list[fx.Node] | None, clears: list[int], ends: list[int]
    ) -> Instruction:
        found = self._called.get(node)
        if found is None:
            found = self._called[node] = self._call(node)
        args, kwargs, tupled, makes, promised = found
        reads: list[tuple[Any, int]] = [(n.args[1], self.register[n]) for n in picked or ()]
        return Instruction(
            target=node.target,  # type: ignore[arg-type]
            args=args,
            kwargs=kwargs,
            outs=tuple(reads) if tupled else ((0, self.register[node]),),
            tupled=tupled,
            makes=makes,
            promised=promised,
            workspace_bytes=self.costs.get(node.name, NodeCost()).workspace_bytes,
            clears=tuple(clears),
            ends=tuple(ends),
        )

    def _call(self, node: fx.Node) -> tuple[Any, ...]:
        """Return what an operator's instruction is in all programs: arguments, whether it makes several, storages."""

        def convert(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return value.meta["constant"] if value.op == "get_attr" else Slot(self.register[value])
            if isinstance(value, (list, tuple)):
                return type(value)(convert(v) for v in value) if not isinstance(value, torch.Size) else value
            return value

        value: Any = node.meta.get("val")
        tupled = isinstance(value, (tuple, list))
        own = set(self.made_by(node))
        makes, promised = [], []
        for position, element in enumerate(list(value) if tupled else [value]):
            if isinstance(element, torch.Tensor):
                number = self.number[storage_key(element.untyped_storage())]
                if number in own:
                    makes.append((position, number, self.bytes[number]))
                    promised.append(element.stride())
        kwargs = {k: convert(v) for k, v in node.kwargs.items()}
        return tuple(convert(a) for a in node.args), kwargs, tupled, tuple(makes), tuple(promised)


def _rise(instructions: tuple[Instruction, ...], sizes: dict[int, int]) -> tuple[int, int]:
    level = rise = 0
    for step in instructions:
        level += sum(nbytes for _, _, nbytes in step.makes)
        rise = max(rise, level + step.workspace_bytes)
        level -= sum(sizes[s] for s in step.ends)
    return rise, level
