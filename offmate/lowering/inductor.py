"""Block classes compiled with torch's Inductor: each chosen option's forward and backward as one function.

The plan does not change: it counts what the operators hold when they run one by one, and a compiled program is used
only if it was measured to fit in that and the schedule's spare room. A refused program stays as it is, with one log
line.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capture.effects import is_random
from ..errors import DeviceError
from ..machines.allocations import allocation_log
from ..machines.devices import accelerator, rng_untouched
from ..programs.outline import Outline, Unfit, as_function, left_like, likes, mismatch, outline, samples
from ..programs.programs import ClassGraph, Programs
from ..progress import Progress
from ..runtime.layouts import as_layout
from ..runtime.ledger import Ledger
from ..runtime.replay.program import BlockProgram, Fused, run
from ..runtime.torch_names.operators import OpOverload, schema_of
from ..sizes import format_bytes
from ..solver.schedule import Schedule
from ..solver.simulate import room_bytes
from .problem import Lowered

log = logging.getLogger("offmate")

Function = Callable[[list[torch.Tensor]], Any]

_LEAST_OPERATORS = 2  # for a single one Inductor calls the same kernel
_UNLIMITED = 2**62
_ROUNDING = 0.05  # of several operators in bfloat16


@dataclass(frozen=True)
class _Key:
    """The key of a compiled program: class, saved storages, direction, device; on a CPU also the number of threads."""

    class_key: str
    saved: frozenset[int]
    direction: str
    kind: str
    threads: int


_known: dict[_Key, tuple[Function, int]] = {}


def check_inductor(kind: str) -> None:
    """Raise DeviceError if Inductor cannot compile for a kind of device on this machine, naming what is missing."""
    from ..runtime.torch_names import inductor  # takes seconds to import

    where = accelerator(kind)
    instead = 'or leave backend at "eager"'
    if where is None:
        if not inductor.has_cpp_compiler():
            raise DeviceError(
                'backend="inductor" needs a C++ compiler on the emulated device, and none was found; install g++ '
                f"(Debian, Ubuntu: apt install g++), name one in the environment's CXX, {instead}"
            )
        return
    if not inductor.writes_code_for(where.type):
        raise DeviceError(f'backend="inductor": Inductor writes no code for {where.type!r}; leave backend at "eager"')
    if not inductor.has_triton():
        raise DeviceError(
            f'backend="inductor" needs Triton on {where}, but it is not installed or does not support this GPU '
            f"(compute capability 7.0 or higher); pip install triton, {instead}"
        )


def compiled(lowered: Lowered, schedule: Schedule, kind: str, say: Progress) -> Lowered:
    """Compile the blocks' programs, each class's once per option that a block has.

    Parameters
    ----------
    schedule: the one that will be replayed. kind: of device. say: reports progress.

    Returns: `lowered` with `Program.fused` set where Inductor's code stays within the schedule's peak.
    """
    members: dict[tuple[str, int], list[int]] = {}
    for index, (block, option) in enumerate(zip(lowered.blocks, schedule.options)):
        members.setdefault((block.key, option), []).append(index)
    room = room_bytes(schedule)
    classes = dict(lowered.classes)
    done = total = 0
    for position, ((key, option), indices) in enumerate(members.items()):
        say("compiling blocks", position / len(members))
        cls = classes[key]
        own = cls.options[option]
        like = _Key(key, own.kept | own.offloaded, "", kind, torch.get_num_threads())
        with rng_untouched(accelerator(kind)):
            programs = _compiled_pair(cls.graph, own.programs, like, indices, room)
        classes[key] = replace(
            cls, options=(*cls.options[:option], replace(own, programs=programs), *cls.options[option + 1 :])
        )
        both = [program for program in (programs.forward, programs.backward) if program.instructions]
        done += sum(program.fused is not None for program in both)
        total += len(both)
    log.info(
        "Inductor runs %d of the %d programs of the block classes; the others run operator by operator", done, total
    )
    return replace(lowered, classes=classes)


def _compiled_pair(
    graph: ClassGraph, programs: Programs, key: _Key, indices: list[int], room: dict[str, int]
) -> Programs:
    words = f"block{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"
    decision = _decided_again(graph, programs)
    if decision is not None:
        log.info(
            "%s: not compiled, since the backward runs %s again, which may decide differently if its rounding differs",
            words, decision,
        )  # fmt: skip
        return programs

    def one(program: BlockProgram, direction: str) -> BlockProgram:
        names = [f"{direction[0].upper()}{index}" for index in indices]
        # An evaluation has no backward.
        rooms = [room[name] for name in names if name in room]
        if not rooms or sum(bool(step.makes) for step in program.instructions) < _LEAST_OPERATORS:
            return program
        own = replace(key, direction=direction)
        return _compiled_or_not(graph, program, own, f"the {direction} of {words}", min(rooms))

    return replace(programs, forward=one(programs.forward, "forward"), backward=one(programs.backward, "backward"))


def _decided_again(graph: ClassGraph, programs: Programs) -> str | None:
    """Find an operator that turns numbers into indices (the choice of experts) and that the backward runs again."""
    again = {register for step in programs.backward.instructions for _, register in step.outs}
    for node in graph.joint.forward:
        value = node.meta["val"]
        if graph.register[node] not in again or not isinstance(value, torch.Tensor) or not _is_index(value):
            continue
        operator_node: Any = node.args[0] if node.target is operator.getitem else node
        if any(a.meta["val"].dtype.is_floating_point for a in operator_node.all_input_nodes):
            return str(operator_node.name)
    return None


def _is_index(value: torch.Tensor) -> bool:
    return not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.bool


def _compiled_or_not(graph: ClassGraph, program: BlockProgram, key: _Key, words: str, room: int) -> BlockProgram:
    """Return the program with Inductor's code for it, if that code keeps every promise of the plan.

    Parameters
    ----------
    room: how many bytes more it may hold than the operators one by one.
    """
    try:
        _check_operators(program)
        ports = outline(graph, program)
        if key not in _known:
            _known[key] = _compile(graph, program, ports, key.kind)
        function, peak_bytes = _known[key]
    except Unfit as reason:
        log.info("%s: not compiled, since %s", words, reason)
        return program
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("%s: not compiled, since Inductor failed (%s: %s)", words, type(error).__name__, first)
        return program
    if peak_bytes > program.rise_bytes + room:
        log.info(
            "%s: not compiled, since Inductor's code would hold %s, but the plan counts %s and has room for only %s "
            "more",
            words, format_bytes(peak_bytes), format_bytes(program.rise_bytes), format_bytes(room),
        )  # fmt: skip
        return program
    rise_bytes = max(peak_bytes, program.rise_bytes)
    fused = Fused(function, ports.inputs, ports.constants, ports.clears, ports.ends, ports.makes, rise_bytes)
    return replace(program, fused=fused)


def _compile(graph: ClassGraph, program: BlockProgram, ports: Outline, kind: str) -> tuple[Function, int]:
    """Compile a program and check it on samples; return the function, and the bytes by which it rises."""
    plain = as_function(graph, program, ports)
    function = compile_function(plain, likes(graph, ports), left_like(graph, ports), ports.donated)
    _check_results(graph, program, ports, function, kind)
    return function, measure_peak(graph, ports, function)


def _check_operators(program: BlockProgram) -> None:
    for step in program.instructions:
        target = step.target
        if target is as_layout:
            continue
        own = isinstance(target, OpOverload) and target.namespace in ("aten", "prims")
        if not own or schema_of(target).is_mutable:
            raise Unfit(f"{target} is not one of PyTorch's functional operators")
        if "as_strided" in str(target):
            # It counts from the start of the storage, of which Inductor knows only the view that it is given.
            raise Unfit(f"{target} reads memory outside the tensors that the block is given")
        if target is torch.ops.aten.cudnn_batch_norm.default:
            raise Unfit(f"{target} writes running statistics without declaring it")


def compile_function(
    function: Callable[..., list[torch.Tensor]],
    given: list[torch.Tensor],
    left: list[torch.Tensor],
    donated: tuple[int, ...],
) -> Function:
    """Compile a functional Python function of tensors; see the `compile_function` that is called."""
    from ..runtime.torch_names import inductor  # takes seconds to import, and only compilation needs it

    compiled_function: Function = inductor.compile_function(function, given, left, donated)
    return compiled_function


def _check_results(graph: ClassGraph, program: BlockProgram, ports: Outline, function: Function, kind: str) -> None:
    """Run a compiled program once, which also warms it up; it must draw the same random numbers as the operators."""
    where = accelerator(kind)
    given, _ = samples(graph, ports)
    with torch.no_grad():
        start = _generator_state(where)
        results = list(function(list(given)))
        difference = mismatch(graph, ports, given, results)
        if difference is not None:
            raise Unfit(difference)
        end = _generator_state(where)
        _set_generator_state(where, start)
        registers: list[Any] = [None] * program.n_registers
        # Only forwards draw, and a forward frees none of its inputs.
        draws = not program.given and any(map(is_random, graph.joint.forward))
        if draws:
            for register, tensor in zip(ports.inputs, given):
                registers[register] = tensor
            run(program, registers, Ledger(_UNLIMITED), {})
        same = torch.equal(end, _generator_state(where))
    for made, result in zip(ports.makes, results) if draws else ():
        for view in made.views:
            own = registers[view.register]
            same = same and _alike(own, result.as_strided(view.size, view.stride, view.offset))
    if not same:
        raise Unfit("its code draws other random numbers")


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal up to rounding: with another dropout mask, most elements would differ."""
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    largest = a.nan_to_num().abs().max().item() if a.numel() else 0.0
    return torch.allclose(a, b, rtol=_ROUNDING, atol=_ROUNDING * largest, equal_nan=True)


def _generator_state(where: torch.device | None) -> torch.Tensor:
    return torch.get_rng_state() if where is None else torch.get_device_module(where).get_rng_state(where)


def _set_generator_state(where: torch.device | None, state: torch.Tensor) -> None:
    if where is None:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(where).set_rng_state(state, where)


def measure_peak(graph: ClassGraph, ports: Outline, function: Function) -> int:
    """Measure the most bytes that a compiled program holds above its start, less the inputs that it frees."""
    device = likes(graph, ports)[0].device
    with torch.no_grad(), allocation_log(device) as changes:
        tensors, held = samples(graph, ports)
        results = changes.stretch("whole", lambda: function(tensors))
        del results, held
    return changes.rise_bytes("whole")
