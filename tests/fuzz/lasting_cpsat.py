"""CP-SAT in one process for all plans of a process of tests: to start it takes longer than a tiny model's answers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

from offmate.solver.backends.cpsat import CpSat
from offmate.solver.block_graph import BlockGraph

from offmate.lowering import options


class _LastingCpSat(CpSat):
    """CP-SAT in a process that lives as long as this one, and is asked no question twice.

    State, of the class: `_lasting`, the process and whose it is; `_known`, answers by question. Changed by whoever asks
    first.
    """

    _lasting: ClassVar[tuple[Any, int]] = (None, 0)
    _known: ClassVar[dict[str, tuple[frozenset[int], frozenset[int]]]] = {}

    def __exit__(self, *_: object) -> None:
        """The process goes on; it ends with this one, whose end closes its input."""

    def _ask(self, graph: BlockGraph, keep_at_most_bytes: int | None, offload_s_per_byte: float | None) -> Any:
        question = json.dumps([_plain(graph), keep_at_most_bytes, offload_s_per_byte])
        if question not in self._known:
            self._known[question] = super()._ask(graph, keep_at_most_bytes, offload_s_per_byte)
        return self._known[question]

    def _running(self) -> Any:
        kind = type(self)
        child, owner = kind._lasting
        # A child that was forked must not talk into its parent's pipes.
        if child is None or owner != os.getpid() or child.poll() is not None:
            kind._lasting = super()._running(), os.getpid()
        self._child = kind._lasting[0]
        return self._child


def _plain(graph: BlockGraph) -> list[Any]:
    ops = [(op.seconds, op.reads, op.makes, op.recomputable) for op in graph.ops]
    return [ops, [(s.bytes, s.external) for s in graph.storages], sorted(graph.saved)]


@contextlib.contextmanager
def one_cpsat() -> Iterator[None]:
    """Inside, options of block classes are asked of the lasting process."""
    with mock.patch.object(options, "CpSat", _LastingCpSat):
        yield
