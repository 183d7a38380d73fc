"""How a model's blocks fill their programs' registers: the link between a schedule's items and tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ...solver.items import Item
from .program import BlockProgram


@dataclass(frozen=True)
class Port:
    """A register and where its tensor comes from or goes to.

    Parameters
    ----------
    register: its number in the program.
    kind: "param", "buffer", "shared", "value" (an interface value or an output) or "grad" (of a param or a value).
    name: of the tensor; for a gradient with the prefix "param:" or "value:".
    storage: number of the tensor's storage in the program, -1 where nobody asks.
    """

    register: int
    kind: str
    name: str
    storage: int = -1


@dataclass(frozen=True)
class BlockBinding:
    """One block's programs for the option that the schedule chose, and their ports.

    Parameters
    ----------
    inputs: what forward and backward read from outside; the same register numbers serve both.
    results: interface values and outputs that the forward makes; the backward may read them again.
    writes: buffers that the forward writes.
    tangents: gradients that the backward consumes. grads: gradients that it makes.
    kept: storage -> registers that stay on the device between forward and backward. offloaded: likewise, that leave.
    """

    forward: BlockProgram
    backward: BlockProgram
    inputs: tuple[Port, ...]
    results: tuple[Port, ...]
    writes: tuple[Port, ...]
    tangents: tuple[Port, ...]
    grads: tuple[Port, ...]
    kept: dict[int, tuple[int, ...]]
    offloaded: dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class StartBinding:
    """What runs before the first block: the batch comes in and shared values are computed.

    Parameters
    ----------
    program: makes the shared values. inputs: batch tensors, buffers and constants that it reads.
    results: shared values that it makes. batch: names of the batch's tensors, in the order in which they are handed in;
        None for those that nobody reads.
    """

    program: BlockProgram
    inputs: tuple[Port, ...]
    results: tuple[Port, ...]
    batch: tuple[str | None, ...]


@dataclass(frozen=True)
class Binding:
    """A model bound to a schedule.

    Parameters
    ----------
    value_item: name of a value -> item that holds its storage (`v:...` or `o:...`).
    shared_item: name of a shared value -> item that holds its storage (`x:...`).
    constants: tensors that the graph holds itself.
    outputs: names of the values that the model returns.
    """

    start: StartBinding
    blocks: tuple[BlockBinding, ...]
    value_item: dict[str, Item]
    shared_item: dict[str, Item]
    constants: dict[str, torch.Tensor]
    outputs: tuple[str, ...]

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """Names of the model's buffers that operators read or write."""
        ports = [*self.start.inputs, *(port for block in self.blocks for port in (*block.inputs, *block.writes))]
        return tuple(sorted({port.name for port in ports if port.kind == "buffer"}))

    @cached_property
    def written_buffers(self) -> frozenset[str]:
        """Names of the model's buffers that forwards write."""
        return frozenset(port.name for block in self.blocks for port in block.writes)


@dataclass
class HostState:
    """What the host holds of the model: the truth between iterations. Changed by the executor and its workers.

    Parameters
    ----------
    params: host tensor of every parameter. buffers: of every buffer.
    states: optimizer state of every trainable parameter, empty until its first update.
    updates: how many updates each parameter has had.
    grads: host memory that gradients leave to, kept from one iteration to the next.
    totals: parameters of which `grads` holds the sum of this iteration's micro-batches so far.
    gate_is_open: whether updates may begin; plans that share an iteration's micro-batches share its gate.
    """

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    states: dict[str, dict[str, object]] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    totals: set[str] = field(default_factory=set)
    gate_is_open: bool = True


Update = Callable[[str, torch.Tensor, torch.Tensor, dict[str, object]], None]
"""Updates a parameter in place: name, parameter, gradient, its state (filled at the first update)."""
