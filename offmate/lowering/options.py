"""Options of a block class: which tensors of its forward stay, leave or are recomputed, each with its programs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..capture.model import Traced
from ..capture.spec import Joint
from ..programs.programs import ClassGraph, NodeCost, Programs
from ..progress import Progress
from ..solver.backends.cpsat import CpSat
from ..solver.block_graph import BlockGraph, Op, Storage
from ..solver.options.choices import choices
from ..solver.rows import Launched, Option
from .stored import StoredOption

# Smaller tensors never leave, since no budget gains by it. And fused attention keeps the few bytes of its seed in the
# host's own memory, and must find them there.
_TINY_BYTES = 512


@dataclass(frozen=True)
class ClassOption:
    """An option of a class: its programs, and which of the saved storages stay or leave."""

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
        """The registers that the backward of any option reads."""
        return frozenset().union(*(self.graph.read_registers(o.programs.backward) for o in self.options))


def class_options(
    joint: Joint,
    costs: dict[str, NodeCost],
    link_bytes_per_s: float,
    max_options: int,
    last: bool,
    cpsat: CpSat | None = None,
) -> BlockClass:
    """Solve the options of a class and build the programs of each.

    Parameters
    ----------
    costs: per node. link_bytes_per_s: the rate at which offloaded values travel. max_options: how many to keep.
    last: whether the class's blocks have no time to offload anything (the chain's last block).
    cpsat: solves several classes; None to start one for this class.
    """
    graph = ClassGraph(joint, costs)
    if not graph.wanted:
        return BlockClass(graph, (ClassOption("keep", graph.programs(frozenset()), frozenset(), frozenset()),))
    own = frozenset(graph.number.values()) - graph.resting
    forward_own = frozenset(s for n in joint.forward for s in graph.made_by(n)) & own
    found = []
    for choice in choices(_block_graph(graph), link_bytes_per_s, max_options, cpsat):
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
    storages = tuple(Storage(graph.bytes[s], s not in own) for s in range(len(graph.bytes)))
    return BlockGraph(tuple(ops), storages, graph.wanted & own)


def option_numbers(option: ClassOption, incoming_bytes: int) -> Option:
    """Return the solver's view of an option.

    Parameters
    ----------
    incoming_bytes: bytes of the gradients that the backward is given and frees.
    """
    programs = option.programs
    saved = sum(programs.saved_bytes[s] for s in option.kept)
    offloaded = sum(programs.saved_bytes[s] for s in option.offloaded)
    forward, backward = programs.forward, programs.backward
    launched = None
    if forward.launch_s or backward.launch_s:
        launched = Launched(forward.seconds, backward.seconds, forward.launch_s, backward.launch_s)
    return Option(
        name=option.name,
        saved_bytes=saved,
        offloaded_bytes=offloaded,
        forward_s=max(forward.seconds, forward.launch_s),
        backward_s=max(backward.seconds, backward.launch_s),
        forward_peak_bytes=forward.rise_bytes,
        backward_peak_bytes=backward.rise_bytes + saved + offloaded + incoming_bytes,
        launched=launched,
    )


def stored_options(
    traced: Traced, costs: dict[str, dict[str, NodeCost]], out_bytes_per_s: float, most: int, say: Progress
) -> dict[str, tuple[StoredOption, ...]]:
    """Solve the options of every class, in the form that plan files keep.

    Parameters
    ----------
    costs: by class key and node name. out_bytes_per_s: of the link to the host. most: options per class.
    """
    joints = {b.key: b.joint for b in traced.blocks}
    last = traced.blocks[-1].key
    options = {}
    with CpSat() as cpsat:
        for done, (key, joint) in enumerate(joints.items()):
            say("finding options", done / len(joints))
            found = class_options(joint, costs[key], out_bytes_per_s, most, key == last, cpsat)
            options[key] = tuple(
                StoredOption(o.name, tuple(sorted(o.kept)), tuple(sorted(o.offloaded))) for o in found.options
            )
    return options
