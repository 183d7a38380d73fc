"""A program as one function: its inputs, its outputs, and sample inputs to run it on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..runtime.layouts import as_layout, on_storage
from ..runtime.replay.program import BlockProgram, Made, Slot, View
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.tensors import storage_key
from .programs import ClassGraph


class Unfit(Exception):
    """A program cannot be run as one function; the message completes a sentence after "since"."""


@dataclass(frozen=True)
class Outline:
    """A program's inputs and outputs, as `runtime.program.Fused` names them.

    Parameters
    ----------
    returned: per entry of `makes`, the register whose tensor fills the whole storage.
    donated: indices into `inputs` of tensors whose memory results may reuse.
    """

    inputs: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]
    clears: tuple[int, ...]
    ends: tuple[int, ...]
    makes: tuple[Made, ...]
    returned: tuple[int, ...]
    donated: tuple[int, ...]


def outline(graph: ClassGraph, program: BlockProgram) -> Outline:
    """Find the inputs and outputs of a program.

    Raises: Unfit if an output does not lie in a storage that the program makes.
    """
    leaves = [leaf for step in program.instructions for leaf in pytree.tree_leaves((step.args, step.kwargs))]
    filled = {register for step in program.instructions for _, register in step.outs}
    cleared = {register for step in program.instructions for register in step.clears}
    ended = {storage for step in program.instructions for storage in step.ends}
    read = dict.fromkeys(leaf.index for leaf in leaves if isinstance(leaf, Slot))
    inputs = tuple(register for register in read if register not in filled)
    ends = tuple(storage for storage in program.given if storage in ended)
    makes, returned = _left(graph, program, filled - cleared, ended)
    return Outline(
        inputs=inputs,
        constants=tuple({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values()),
        clears=tuple(register for register in inputs if register in cleared),
        ends=ends,
        makes=makes,
        returned=returned,
        donated=_donated(graph, inputs, ends),
    )


def _left(
    graph: ClassGraph, program: BlockProgram, left: set[int], ended: set[int]
) -> tuple[tuple[Made, ...], tuple[int, ...]]:
    """List storages made that do not end, with the registers of `left` that view them, and the one that fills each."""
    values = {register: node.meta.get("val") for node, register in graph.register.items()}
    nodes = {register: node for node, register in graph.register.items()}
    viewers: dict[int, list[int]] = {}
    for register in sorted(left):
        if not isinstance(values[register], torch.Tensor):
            raise Unfit(f"its result {nodes[register].name} is not a tensor")
        viewers.setdefault(graph.storages(nodes[register])[0], []).append(register)
    makes, returned = [], []
    for step in program.instructions:
        at = dict(step.outs)
        for position, storage, nbytes in step.makes:
            if storage in ended:
                continue
            own = viewers.pop(storage, [])
            if position not in at or any(values[r].dtype != values[at[position]].dtype for r in own):
                raise Unfit(f"the result of {step.target} is passed on in part, or with two data types")
            makes.append(Made(storage, nbytes, tuple(_view(r, values[r]) for r in own)))
            returned.append(at[position])
    if viewers:
        raise Unfit("it passes on a view of one of its inputs")
    return tuple(makes), tuple(returned)


def _view(register: int, value: torch.Tensor) -> View:
    return View(register, tuple(value.shape), tuple(value.stride()), int(value.storage_offset()))


def _donated(graph: ClassGraph, inputs: tuple[int, ...], ends: tuple[int, ...]) -> tuple[int, ...]:
    """List inputs that alone view the whole of a storage that ends; no gradients, since the user may own them."""
    joint = graph.joint
    nodes = list(joint.graph.nodes)
    gradients = {*joint.tangents, *joint.accumulators}
    viewers = Counter(storage for register in inputs for storage in graph.storages(nodes[register]))
    found = []
    for index, register in enumerate(inputs):
        (storage,), value = graph.storages(nodes[register]), nodes[register].meta["val"]
        whole = value.numel() * value.element_size() == value.untyped_storage().nbytes()
        if storage in ends and viewers[storage] == 1 and whole and nodes[register] not in gradients:
            found.append(index)
    return tuple(found)


def as_function(graph: ClassGraph, program: BlockProgram, ports: Outline) -> Callable[..., list[torch.Tensor]]:
    """Return the program as a functional Python function of its inputs and constants, for tracing."""
    strides = [list(tensor.stride()) for tensor in left_like(graph, ports)]
    constants = {id(tensor): i for i, tensor in enumerate(ports.constants, len(ports.inputs))}

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        registers: list[Any] = [None] * program.n_registers
        for register, tensor in zip(ports.inputs, tensors):
            registers[register] = tensor

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return registers[leaf.index]
            return tensors[constants[id(leaf)]] if id(leaf) in constants else leaf

        for step in program.instructions:
            args, kwargs = pytree.tree_map(convert, (step.args, step.kwargs))
            result = _INSTEAD.get(step.target, step.target)(*args, **kwargs)
            for position, register in step.outs:
                registers[register] = result[position] if step.tupled else result
        left = [registers[register] for register in ports.returned]
        return [t if list(t.stride()) == stride else _laid_out(t, [], stride) for t, stride in zip(left, strides)]

    return function


def _laid_out(tensor: torch.Tensor, _: list[int], stride: list[int]) -> torch.Tensor:
    """Do what `as_layout` does without writing in place, for strides that leave no gaps; strides of 0 repeat."""
    once = tensor
    for dim, step in enumerate(stride):
        once = once if step or not once.shape[dim] else once.narrow(dim, 0, 1)
    order = sorted(range(tensor.dim()), key=stride.__getitem__, reverse=True)
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return once.permute(order).clone(memory_format=torch.contiguous_format).permute(back).expand(tensor.shape)


# A decomposed operator may lay out its result in another way than the kernel, so that a view of it must be a copy.
_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    as_layout: _laid_out,
    torch.ops.aten.view.default: torch.reshape,
}


def likes(graph: ClassGraph, ports: Outline) -> list[torch.Tensor]:
    """Return a tensor like each argument of the function; those of inputs are fake."""
    nodes = list(graph.joint.graph.nodes)
    return [*(nodes[register].meta["val"] for register in ports.inputs), *ports.constants]


def left_like(graph: ClassGraph, ports: Outline) -> list[torch.Tensor]:
    """Return a fake tensor like each result of the function."""
    nodes = list(graph.joint.graph.nodes)
    return [nodes[register].meta["val"] for register in ports.returned]


def samples(graph: ClassGraph, ports: Outline) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Make tensors to run a program on, laid out as in training, constants last; and list those that outlive the run.

    Storages of which no tensor outlives it are owned by the first list alone.
    """
    nodes = list(graph.joint.graph.nodes)
    storages: dict[int, torch.Tensor] = {}
    found, held = [], []
    for register in ports.inputs:
        value = nodes[register].meta["val"]
        storage = value.untyped_storage()
        if storage_key(storage) not in storages:
            storages[storage_key(storage)] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=value.device)
        tensor = on_storage(storages[storage_key(storage)], value)
        # Floats that differ from each other, and indices that are valid everywhere.
        found.append(tensor.normal_() if value.dtype.is_floating_point else tensor.zero_())
        if not set(graph.storages(nodes[register])) & set(ports.ends):
            held.append(tensor)
    return [*found, *ports.constants], held


def mismatch(graph: ClassGraph, ports: Outline, given: list[torch.Tensor], results: list[torch.Tensor]) -> str | None:
    """Describe how a function's results differ from what the program leaves; None if they do not.

    Every tensor must lie alone in its own storage, in the same place as the program's.
    """
    nodes: list[fx.Node] = list(graph.joint.graph.nodes)
    lent = {storage_key(given[index].untyped_storage()) for index in ports.donated}
    taken = {storage_key(tensor.untyped_storage()) for tensor in given} - lent
    for made, register, result in zip(ports.makes, ports.returned, results, strict=True):
        expected, storage = nodes[register].meta["val"], result.untyped_storage()
        if (result.dtype, result.shape, result.stride()) != (expected.dtype, expected.shape, expected.stride()):
            return f"{nodes[register].name} came back with strides {result.stride()} instead of {expected.stride()}"
        if storage.nbytes() != expected.untyped_storage().nbytes() or storage.nbytes() > made.bytes:
            return f"{nodes[register].name} came back in {storage.nbytes()} bytes instead of {made.bytes}"
        if storage_key(storage) in taken:
            return f"{nodes[register].name} came back in memory of another tensor"
        taken.add(storage_key(storage))
    return None
