"""Seconds and bytes of every operator of every block class and of the prelude, measured on real data."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from ..capture.blocks import TracedBlock
from ..capture.spec import Joint, LowPrecision
from ..errors import CaptureError
from ..machines.allocations import allocation_log
from ..machines.replaying import replaying_s
from ..machines.stopwatch import clock_of, launching_s
from ..programs.prelude import Prelude
from ..programs.programs import ClassGraph, NodeCost
from ..runtime.layouts import as_layout
from ..runtime.ledger import Ledger
from ..runtime.operators.checks import OtherPath
from ..runtime.replay.program import as_promised, run

_REPEATS = 3
_UNLIMITED = 2**62
_STAND_IN = 1e-3  # size of the numbers that stand in for gradients
_DRAWN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # dtypes of which random numbers can be drawn


def profile_classes(
    blocks: tuple[TracedBlock, ...],
    read: Callable[[fx.Node], torch.Tensor],
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, NodeCost]]:
    """Run the chain forward once, block by block, and measure every class at its first block.

    Only the interfaces and one block's tensors are held at a time.

    Parameters
    ----------
    read: returns the real tensor behind a parameter, a buffer or a shared value of the flat graph.
    device: where operators run; tensors that are read come to it for one block at a time.
    progress: called with the number of blocks done, and of all blocks.

    Returns: per class key the cost of every node.
    """
    values: dict[fx.Node, torch.Tensor] = {}
    last_reader = {e.node: i for i, block in enumerate(blocks) for e in block.spec.externals}
    costs: dict[str, dict[str, NodeCost]] = {}
    written: dict[fx.Node, torch.Tensor] = {}

    def fetch(node: fx.Node) -> torch.Tensor:
        if node in values:
            return values[node]
        return written[node] if node in written else _on(read(node), device)

    for index, block in enumerate(blocks):
        inputs = [_as_it_comes(fetch(e.node), e.low) for e in block.spec.externals]
        if block.key not in costs:
            costs[block.key] = _measure(block.joint, inputs, device)
        results, writes = _run_forward(block.joint, inputs)
        values |= dict(zip(block.spec.results, results))
        written |= {block.spec.externals[i].node: tensor for i, tensor in writes.items()}
        for node in [n for n in values if last_reader.get(n, -1) <= index]:
            del values[node]
        progress(index + 1, len(blocks))
    return costs


def profile_prelude(
    prelude: Prelude, tensors: dict[str, torch.Tensor], device: torch.device
) -> tuple[dict[fx.Node, torch.Tensor], dict[str, NodeCost]]:
    """Compute the shared values, and measure the cost of computing them.

    Parameters
    ----------
    tensors: batch, buffers and constants by placeholder name. device: where operators run.

    Returns: the shared values by node of the flat graph, and the cost of every node of the prelude's graph.
    """
    if prelude.graph is None:
        return {}, {}
    inputs = [_on(tensors[e.node.name], device) for e in prelude.spec.externals]
    costs = _measure(prelude.graph.joint, inputs, device)
    results, _ = _run_forward(prelude.graph.joint, inputs)
    return dict(zip(prelude.spec.results, results)), costs


def _run_forward(joint: Joint, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    graph = ClassGraph(joint)
    program = graph.programs(frozenset(graph.number.values()) - graph.resting).forward
    registers: list[Any] = [None] * program.n_registers
    for tensor, leaves in zip(inputs, joint.leaves):
        for leaf in leaves:
            registers[graph.register[leaf]] = tensor
    run(program, registers, Ledger(_UNLIMITED), {})
    writes = {i: registers[graph.register[n]] for i, n in joint.writes.items()}
    return [registers[graph.register[r]] for r in joint.results], writes


def _measure(joint: Joint, inputs: list[torch.Tensor], device: torch.device) -> dict[str, NodeCost]:
    """Time every node of a joint graph, and read the workspace of its kernel from the allocator.

    The graph runs twice, since watching the allocator takes time; values are freed after their last reader. Seconds of
    the device and of the host, which launches, are measured apart.
    """
    clock = clock_of(device)
    replay_s = replaying_s() if device.type != "cpu" else 0.0
    seconds: dict[fx.Node, float] = {}
    launch_s: dict[fx.Node, float] = {}
    storages: dict[fx.Node, tuple[int, ...]] = {}
    with allocation_log(device) as log:
        for node, work in _run_through(joint, inputs, device):
            result = log.stretch(node.name, work)
            storages[node] = _storage_bytes(node, result)
            work.result = result
            del result
    for node, work in _run_through(joint, inputs, device):
        work.result = work()
        if node.target is not operator.getitem:
            seconds[node] = statistics.median(clock(work) for _ in range(_REPEATS))
            launch_s[node] = replay_s + statistics.median(launching_s(work, device) for _ in range(_REPEATS))
    workspace = log.workspace_bytes()
    return {
        n.name: NodeCost(seconds.get(n, 0.0), workspace.get(n.name, 0), storages[n], launch_s.get(n, 0.0))
        for n in storages
    }


class _Work:
    """An operator with its arguments; the caller sets `result` to what it returned."""

    def __init__(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        self._target: Any = node.target
        self._promised = node.meta["val"]
        self._args, self._kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        self.result: Any = None

    def __call__(self) -> Any:
        try:
            result = self._target(*self._args, **self._kwargs)
        except OtherPath:
            result = None  # these values stand for others
        except (torch.OutOfMemoryError, torch.linalg.LinAlgError):
            raise  # these are raised as plain PyTorch raises them: loops handle them
        except RuntimeError as error:
            raise CaptureError(
                f"{self._target} fails on this batch, as it would in plain PyTorch: {str(error).splitlines()[0]}. Call "
                "the plain model with the batch to see where. If it mixes dtypes, use model.to(dtype) or torch.autocast"
            ) from error
        if isinstance(self._promised, (tuple, list)):
            return type(result)(self._laid_out(*pair) for pair in zip(result, self._promised))
        return self._laid_out(result, self._promised)

    def _laid_out(self, got: Any, promised: Any) -> Any:
        """Return what was got in the layout that a replay gives it."""
        if not isinstance(got, torch.Tensor) or not isinstance(promised, torch.Tensor):
            return got
        return got if got.stride() == promised.stride() else as_promised(self._target, got, promised.stride())


def _run_through(joint: Joint, inputs: list[torch.Tensor], device: torch.device) -> Iterator[tuple[fx.Node, _Work]]:
    """Iterate over the nodes of a joint graph in order, each with a callable that runs it."""
    env: dict[fx.Node, Any] = {n: n.meta["constant"] for n in joint.graph.nodes if n.op == "get_attr"}
    for tensor, leaves in zip(inputs, joint.leaves):
        env |= dict.fromkeys(leaves, tensor)
    for node in [*joint.tangents, *joint.accumulators]:
        if node is not None:
            env[node] = _like(node.meta["val"], device)
    order = [*joint.forward, *joint.backward]
    last_reader = {source: node for node in order for source in node.all_input_nodes}
    for node in order:
        work = _Work(node, env)
        yield node, work
        env[node] = work.result
        del work
        for source in {node, *node.all_input_nodes}:
            if last_reader.get(source, node) is node:
                env.pop(source, None)


def _as_it_comes(tensor: torch.Tensor, low: LowPrecision | None) -> torch.Tensor:
    return tensor.to(low.dtype) if low is not None and low.copied else tensor


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device if needed, with the same strides: kernels were traced for them."""
    return tensor if tensor.device == device else as_layout(tensor, tensor.shape, tensor.stride(), device)


def _like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a stand-in for a gradient: small random numbers, since a card is faster on equal ones. Integers are 0.

    Its whole storage is filled, since elements of the tensor may share memory.
    """
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if value.dtype not in _DRAWN:
        return tensor.fill_(_STAND_IN) if value.dtype.is_floating_point else tensor.zero_()
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    tensor.as_strided((elements,), (1,)).normal_(std=_STAND_IN)
    return tensor


def _storage_bytes(node: fx.Node, real: Any) -> tuple[int, ...]:
    """Return the real bytes behind the node's tensors if its fake kernel promised others, else nothing.

    A kernel may leave out a result that was not requested, although its fake kernel makes it: that takes no bytes.

    Raises: CaptureError if a result that was left out is read: the trace would not match what runs.
    """
    fake = node.meta["val"]
    pairs = zip(real, fake) if isinstance(fake, (tuple, list)) else [(real, fake)]
    tensors = [(got, expected) for got, expected in pairs if isinstance(expected, torch.Tensor)]
    for got, _ in tensors:
        if got is None and (node.users if node.target is operator.getitem else not isinstance(real, (tuple, list))):
            raise CaptureError(
                f"{node.format_node()} returned None, but its fake kernel promised a tensor, which the model reads. "
                "The trace does not match what runs. Please report the operator"
            )
    found = tuple(0 if got is None else got.untyped_storage().nbytes() for got, _ in tensors)
    return found if found != tuple(e.untyped_storage().nbytes() for _, e in tensors) else ()
