"""A program: the operators of a block's forward or backward in order, with the storages that each makes and frees."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..layouts import as_layout, steps_of
from ..ledger import Ledger
from ..memory.arena import Arena

log = logging.getLogger("offmate")

_warned: set[Any] = set()  # operators of which it has been said that their kernels choose another layout


@dataclass(frozen=True)
class Slot:
    """A place in an instruction's arguments that a register fills."""

    index: int


@dataclass(frozen=True)
class Instruction:
    """One operator.

    Parameters
    ----------
    target: the operator. args, kwargs: its arguments, registers as Slots.
    outs: (position in the result, register) of each tensor that is read later; position 0 for a result that is no
        tuple.
    tupled: whether the result is a tuple.
    makes: (position, storage, bytes) of every storage that the operator allocates, bytes as profiled.
    promised: per entry of `makes` the strides for which what reads it was traced.
    workspace_bytes: bytes that its kernel holds beyond its results while it runs.
    clears: registers that nothing reads afterwards. ends: storages that are freed afterwards.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[tuple[int, int], ...]
    tupled: bool
    makes: tuple[tuple[int, int, int], ...]
    promised: tuple[tuple[int, ...], ...]
    workspace_bytes: int
    clears: tuple[int, ...]
    ends: tuple[int, ...]

    @cached_property
    def allocates(self) -> tuple[int, ...]:
        """Bytes of everything that must fit at once."""
        return (*(size for _, _, size in self.makes), self.workspace_bytes)

    @cached_property
    def allocates_once(self) -> bool:
        """Return whether one result is the only allocation."""
        return len(self.makes) == 1 and not self.workspace_bytes


@dataclass(frozen=True)
class View:
    """The layout of a register's tensor in its storage: strides and offset in elements."""

    register: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Made:
    """A storage that a fused program leaves: its number, its bytes as profiled, and the views of it."""

    storage: int
    bytes: int
    views: tuple[View, ...]


@dataclass(frozen=True)
class Fused:
    """A whole program as one function, which does what the instructions do.

    Parameters
    ----------
    function: takes a list of tensors, which it empties so that each can be freed after its last reader; returns a
        tensor per storage that outlives the program.
    inputs: registers that it reads, in order. constants: further tensors that it reads, after those.
    clears: registers that nothing reads afterwards. ends: storages given to the program that are freed in it.
    makes: for each tensor returned, the storage that it is.
    rise_bytes: the most by which the bytes held exceed their level at the start, as counted.
    """

    function: Callable[[list[Any]], Any]
    inputs: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]
    clears: tuple[int, ...]
    ends: tuple[int, ...]
    makes: tuple[Made, ...]
    rise_bytes: int


@dataclass(frozen=True)
class BlockProgram:
    """Instructions over registers.

    Parameters
    ----------
    n_registers: how many registers a run needs.
    instructions: in order.
    given: storage number -> bytes as profiled, of the storages that exist before the run and that it may free.
    rise_bytes: the most by which the bytes held exceed their level at the start.
    net_bytes: the level at the end minus that at the start.
    seconds: the operators' measured seconds on the device, added up.
    fused: the function that runs instead of the instructions, if there is one.
    launch_s: seconds that the host needs to launch the instructions; 0 if the device is the host.
    """

    n_registers: int
    instructions: tuple[Instruction, ...]
    given: dict[int, int]
    rise_bytes: int
    net_bytes: int
    seconds: float
    fused: Fused | None = None
    launch_s: float = 0.0


def run(
    program: BlockProgram, registers: list[Any], ledger: Ledger, given: dict[int, int], arena: Arena | None = None
) -> dict[int, int]:
    """Execute a program, telling the ledger of every storage made and freed.

    Parameters
    ----------
    registers: filled with the program's inputs; results are left in it.
    given: bytes of the storages that the run may free, by storage number; they are in the ledger already.
    arena: the arena that makes room for results, if there is one.

    Returns: bytes of the storages still alive at the end, by storage number, `given` included.
    """
    live = dict(given)
    if program.fused is not None:
        return _run_fused(program.fused, registers, ledger, live, arena)
    for step in program.instructions:
        if arena is not None:
            arena.room(step.allocates)
        result = step.target(*_fill(step.args, registers), **_fill_map(step.kwargs, registers))
        made = 0
        for (position, storage, _), stride in zip(step.makes, step.promised):
            element = result[position] if step.tupled else result
            if element is not None and element.stride() != stride:
                element = as_promised(step.target, element, stride)
                result = (*result[:position], element, *result[position + 1 :]) if step.tupled else element
            # A kernel may leave out results that were not requested.
            live[storage] = nbytes = 0 if element is None else element.untyped_storage().nbytes()
            made += nbytes
            if arena is not None and element is not None:
                arena.note(element, alone=step.allocates_once)
        for position, register in step.outs:
            registers[register] = result[position] if step.tupled else result
        ledger.made(made, step.workspace_bytes)
        result = element = None
        for register in step.clears:
            registers[register] = None
        if step.ends:
            ledger.freed(sum(live.pop(storage) for storage in step.ends))
    return live


def as_promised(target: Callable[..., Any], result: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return an operator's result in the layout for which what reads it was traced: a copy if the kernel chose another.

    Parameters
    ----------
    target: the operator, for a warning, which is given once. stride: the layout.
    """
    if steps_of(result.shape, result.stride()) == steps_of(result.shape, stride):
        return result
    if target not in _warned:
        _warned.add(target)
        log.warning(
            "%s returned strides %s, but its fake kernel promised %s, so its results are copied into that layout. "
            "Operators after it may round differently from plain PyTorch in the last bits",
            target, result.stride(), stride,
        )  # fmt: skip
    return as_layout(result, result.shape, stride)


def _run_fused(
    fused: Fused, registers: list[Any], ledger: Ledger, live: dict[int, int], arena: Arena | None
) -> dict[int, int]:
    """Run a program's fused function, counted as one rise followed by the storages that it leaves."""
    inputs = [*(registers[register] for register in fused.inputs), *fused.constants]
    for register in fused.clears:
        registers[register] = None
    ledger.made(0, fused.rise_bytes)
    if arena is not None:
        arena.room((fused.rise_bytes,))
    results = fused.function(inputs)
    ledger.freed(sum(live.pop(storage) for storage in fused.ends))
    for made, result in zip(fused.makes, results, strict=True):
        live[made.storage] = made.bytes
        if arena is not None:
            arena.note(result)
        for view in made.views:
            registers[view.register] = result.as_strided(view.size, view.stride, view.offset)
    ledger.made(sum(made.bytes for made in fused.makes))
    return live


def _fill(args: Any, registers: list[Any]) -> Any:
    filled = []
    for a in args:
        if isinstance(a, Slot):
            filled.append(registers[a.index])
        elif isinstance(a, (list, tuple)):
            filled.append(type(a)(_fill(a, registers)))
        else:
            filled.append(a)
    return filled


def _fill_map(kwargs: dict[str, Any], registers: list[Any]) -> dict[str, Any]:
    if not kwargs:
        return kwargs
    return dict(zip(kwargs, _fill(kwargs.values(), registers)))
