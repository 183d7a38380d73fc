"""The binding of a model's blocks to their programs' registers: the link between a schedule's items and tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from ...solver.items import Item
from ..operators.draws import draw
from ..storage.file_bytes import FileBytes
from ..storage.mapped import MappedStore
from .low_copies import WHOLE
from .program import BlockProgram, Instruction
from .unscaling import Unscaling


@dataclass(frozen=True)
class Port:
    """A register, and the source or destination of its tensor.

    Parameters
    ----------
    register: its number in the program.
    kind: "param", "buffer", "shared", "value" (an interface value or an output) or "grad" (of a param or a value).
    name: name of the tensor; for a gradient with the prefix "param:" or "value:".
    storage: number of the tensor's storage in the program, -1 if it is not needed.
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
    inputs: ports that forward and backward read from outside; both use the same register numbers.
    results: interface values and outputs that the forward makes; the backward may read them again.
    writes: buffers that the forward writes.
    tangents: gradients that the backward consumes. grads: gradients that it makes.
    kept: storage -> registers that stay on the device between forward and backward. offloaded: storage -> registers
        that leave.
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

    @cached_property
    def made_bytes(self) -> dict[int, int]:
        """The bytes of every storage that the forward makes, as profiled."""
        return {storage: size for step in self.forward.instructions for _, storage, size in step.makes}


@dataclass(frozen=True)
class StartBinding:
    """The program before the first block: the batch comes in and shared values are computed.

    Parameters
    ----------
    program: the program that makes the shared values. inputs: batch tensors, buffers and constants that it reads.
    results: shared values that it makes. batch: names of the batch's tensors, in the order in which they are handed in;
        None for those that no program reads.
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
    constants: by name, tensors that the graph itself holds.
    outputs: names of the values that the model returns. advances: by block, how far its forward moves the generator of
        a card, in order; empty if that need not be known.
    """

    start: StartBinding
    blocks: tuple[BlockBinding, ...]
    value_item: dict[str, Item]
    shared_item: dict[str, Item]
    constants: dict[str, torch.Tensor]
    outputs: tuple[str, ...]
    advances: dict[int, int] = field(default_factory=dict)

    @cached_property
    def values_in(self) -> dict[Item, tuple[str, ...]]:
        """By item, the names of the values whose storage it is."""
        found: dict[Item, tuple[str, ...]] = {}
        for name, item in self.value_item.items():
            found[item] = (*found.get(item, ()), name)
        return found

    @cached_property
    def drawing(self) -> dict[int, tuple[Instruction, ...]]:
        """By block, the operators of its forward that draw random numbers."""
        found = {
            i: tuple(one for one in b.forward.instructions if one.target is draw) for i, b in enumerate(self.blocks)
        }
        return {i: those for i, those in found.items() if those}

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
    """The host's copy of the model, which is current between iterations. Changed by the executor and its workers.

    Parameters
    ----------
    params: host tensor of every parameter. buffers: host tensor of every buffer.
    states: optimizer state of every trainable parameter, empty until its first update.
    updates: number of updates that each parameter has had.
    grads: host memory that gradients leave to, kept from one iteration to the next.
    totals: parameters for which `grads` holds the sum over this iteration's micro-batches so far.
    gate_is_open: whether updates may begin; plans that share an iteration's micro-batches share this gate.
    norm: the global norm of the last iteration's gradients, whichever plan made them; None without clipping.
    unscaling: unscales gradients once they are complete; None if no loss is scaled.
    files: frozen parameters that can be read from files, byte for byte as in `params`.
    store: host memory in files; None if there is none. in_store: the parameters whose states are kept there.
    low: parameters of which `params` holds a copy in a lower precision; they themselves are in `states`, under `WHOLE`.
    newer_copies: parameters in files of the store that are older than the float32 copies in their states (see cast.py).
    """

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    states: dict[str, dict[str, object]] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    totals: set[str] = field(default_factory=set)
    gate_is_open: bool = True
    norm: torch.Tensor | None = None
    unscaling: Unscaling | None = None
    files: dict[str, FileBytes] = field(default_factory=dict)
    store: MappedStore | None = None
    in_store: frozenset[str] = frozenset()
    low: set[str] = field(default_factory=set)
    newer_copies: set[str] = field(default_factory=set)

    @property
    def stored(self) -> bool:
        """Whether any parameter or optimizer state lies in files of the store."""
        return self.store is not None and (bool(self.in_store) or any(map(self.stores, self.params)))

    def stores(self, name: str) -> bool:
        """Return whether the memory of a parameter lies in files of the store."""
        return self.store is not None and self.store.holds(self.params[name])

    def whole(self, name: str) -> torch.Tensor:
        """Return a parameter in its own precision."""
        own = self.states[name][WHOLE] if name in self.low else self.params[name]
        assert isinstance(own, torch.Tensor)
        return own

    def is_low(self, name: str, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is in a lower precision than its parameter, and has to be cast before all else."""
        return gradient.dtype != self.whole(name).dtype

    def written(self, tensors: Iterable[object]) -> None:
        """Note that host memory was written to in another way than by copies from the device."""
        for tensor in tensors:
            if self.store is not None and isinstance(tensor, torch.Tensor):
                self.store.forget(tensor)

    def states_written(self, name: str) -> None:
        """Note that the state of a parameter was written to in another way than by copies from the device."""
        self.written(self.states.get(name, {}).values())


class Update(Protocol):
    """Updates a parameter in place."""

    def __call__(
        self,
        name: str,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, object],
        factor: torch.Tensor | None = None,
        casts: bool = True,
    ) -> None:
        """Update `param`.

        Parameters
        ----------
        state: filled at the first update. factor: by which the gradient is multiplied first, in place, None for 1.
        casts: whether a parameter with a float32 copy in its state takes the copy's new value.
        """
        ...
