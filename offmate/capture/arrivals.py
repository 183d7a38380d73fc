"""The arrival of gradients at parameters in plain PyTorch: their order, and which of them come in several parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .blocks import TracedBlock


@dataclass(frozen=True)
class Arrivals:
    """Gradients of parameters, by name, as a backward of plain PyTorch makes them.

    Parameters
    ----------
    order: names in the order of completion. summed: those that autograd adds up from several places of the model.
    """

    order: tuple[str, ...] = ()
    summed: frozenset[str] = frozenset()


def arrivals(blocks: Sequence[TracedBlock], params: dict[str, str]) -> Arrivals:
    """Find out how the gradients that a chain of blocks makes arrive.

    Parameters
    ----------
    params: name of a placeholder -> name of the parameter.
    """
    order: dict[str, None] = {}
    parts: Counter[str] = Counter()
    for block in reversed(blocks):
        place = {node: at for at, node in enumerate(block.joint.backward)}
        made: list[tuple[int, str]] = []
        for external, grad, n_parts in zip(block.spec.externals, block.joint.grads, block.joint.gradient_parts):
            if grad is not None and (name := params.get(external.node.name)) is not None:
                made.append((place.get(grad, -1), name))
                parts[name] += n_parts
        for _, name in sorted(made):
            order.pop(name, None)  # complete with its last part
            order[name] = None
    return Arrivals(tuple(order), frozenset(name for name, count in parts.items() if count > 1))
