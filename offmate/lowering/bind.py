"""Binds the solver's answer to tensors: which register of which program each item fills."""

from __future__ import annotations

from ..capture.blocks import TracedBlock
from ..capture.captured import Captured
from ..capture.spec import External
from ..programs.prelude import Prelude
from ..programs.programs import ClassGraph
from ..runtime.replay.binding import Binding, BlockBinding, Port, StartBinding
from ..runtime.replay.program import BlockProgram
from ..solver import items
from .options import BlockClass, ClassOption
from .problem import Lowered


def bind(captured: Captured, lowered: Lowered, options: tuple[int, ...]) -> Binding:
    """Bind every block's programs for its chosen option.

    Parameters
    ----------
    options: option index per block.
    """
    blocks = tuple(
        _block(captured, block, lowered.classes[block.key], lowered.classes[block.key].options[option])
        for block, option in zip(lowered.blocks, options)
    )
    returned = tuple(dict.fromkeys(o for o in captured.outputs if isinstance(o, str)))
    return Binding(
        start=_start(captured, lowered.prelude),
        blocks=blocks,
        value_item=lowered.value_item,
        shared_item={node.name: items.shared(item) for node, item in lowered.prelude.item.items()},
        constants=dict(captured.constants),
        outputs=returned,
    )


def _name(captured: Captured, external: External) -> str:
    node = external.node.name
    return captured.params.get(node) or captured.buffers.get(node) or node


def _block(captured: Captured, block: TracedBlock, cls: BlockClass, option: ClassOption) -> BlockBinding:
    joint, graph, programs = block.joint, cls.graph, option.programs
    read = graph.read_registers(programs.forward) | graph.read_registers(programs.backward)
    inputs = tuple(
        Port(graph.register[leaf], e.kind, _name(captured, e))
        for e, leaves in zip(block.spec.externals, joint.leaves)
        for leaf in leaves
        if graph.register[leaf] in read
    )
    inputs += tuple(
        Port(graph.register[n], "buffer", _name(captured, block.spec.externals[i]))
        for i, n in joint.writes.items()
        if graph.register[n] in graph.read_registers(programs.backward)
    )
    tangents = [
        Port(graph.register[t], "grad", f"value:{block.spec.results[i].name}", graph.storages(t)[0])
        for (i, _), t in zip(block.spec.tangents, joint.tangents)
    ]
    grads = []
    for external, accumulator, grad in zip(block.spec.externals, joint.accumulators, joint.grads):
        key = f"{'param' if external.kind == 'param' else 'value'}:{_name(captured, external)}"
        if accumulator is not None:
            tangents.append(Port(graph.register[accumulator], "grad", key, graph.storages(accumulator)[0]))
        if grad is not None:
            grads.append(Port(graph.register[grad], "grad", key, graph.storages(grad)[0]))
    return BlockBinding(
        forward=programs.forward,
        backward=programs.backward,
        inputs=inputs,
        results=tuple(
            Port(graph.register[r], "value", n.name, graph.storages(r)[0])
            for n, r in zip(block.spec.results, joint.results)
        ),
        writes=tuple(
            Port(graph.register[n], "buffer", _name(captured, block.spec.externals[i]), graph.storages(n)[0])
            for i, n in joint.writes.items()
        ),
        tangents=tuple(tangents),
        grads=tuple(grads),
        kept={s: programs.saved[s] for s in sorted(option.kept)},
        offloaded={s: programs.saved[s] for s in sorted(option.offloaded)},
    )


def _start(captured: Captured, prelude: Prelude) -> StartBinding:
    batch = tuple(name if name in prelude.batch_bytes else None for name in captured.inputs)
    if prelude.graph is None or prelude.program is None:
        return StartBinding(BlockProgram(0, (), {}, 0, 0, 0.0), (), (), batch)
    graph: ClassGraph = prelude.graph
    inputs = tuple(
        Port(graph.register[leaves[0]], e.kind, _name(captured, e), graph.storages(leaves[0])[0])
        for e, leaves in zip(prelude.spec.externals, graph.joint.leaves)
    )
    results = tuple(
        Port(graph.register[r], "shared", n.name, graph.storages(r)[0])
        for n, r in zip(prelude.spec.results, graph.joint.results)
    )
    return StartBinding(prelude.program, inputs, results, batch)
