"""A block's forward and backward as plain numbers: operators, and the storages that they read and make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


class GraphError(ValueError):
    """A block graph that contradicts itself: the message names the op or the storage."""


@dataclass(frozen=True)
class Op:
    """A forward operation.

    Parameters
    ----------
    reads, makes: indices of storages. A view makes nothing.
    recomputable: False for operations that draw random numbers or change state.
    """

    name: str
    seconds: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    recomputable: bool


@dataclass(frozen=True)
class Storage:
    """Memory behind one or several tensors; `external` if the block does not make it (parameters, inputs, shared)."""

    bytes: int
    external: bool


@dataclass(frozen=True)
class BlockGraph:
    """The forward of a block class.

    Parameters
    ----------
    ops: in program order. Each storage that is not external is made by exactly one of them.
    saved: storages that the backward reads; external ones are ignored.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saved: frozenset[int]

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def maker(self) -> dict[int, int]:
        """The index of the op that makes each of the block's own storages."""
        return {j: a for a, op in enumerate(self.ops) for j in op.makes if not self.storages[j].external}

    def own(self, storages: Iterable[int]) -> frozenset[int]:
        """Return those of `storages` that are not external."""
        return frozenset(j for j in storages if not self.storages[j].external)

    def bytes_of(self, storages: Iterable[int]) -> int:
        """Return the total bytes of `storages`."""
        return sum(self.storages[j].bytes for j in storages)


def _check(graph: BlockGraph) -> None:
    makers: dict[int, str] = {}
    for op in graph.ops:
        if not 0 <= op.seconds < float("inf"):
            raise GraphError(f"op {op.name}: seconds is {op.seconds}; it must be finite and not negative")
        for j in (*op.reads, *op.makes):
            if not 0 <= j < len(graph.storages):
                raise GraphError(f"op {op.name}: there is no storage {j}")
        for j in graph.own(op.reads):
            if j not in makers:
                raise GraphError(f"op {op.name} reads storage {j}, which no earlier op makes")
        for j in graph.own(op.makes):
            if j in makers:
                raise GraphError(f"storage {j} is made by {makers[j]} and by {op.name}")
            makers[j] = op.name
    for j in graph.own(graph.saved):
        if j not in makers:
            raise GraphError(f"storage {j} is saved, but no op makes it")
