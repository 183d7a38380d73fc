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
from offmate.solver.options import choices


class _LastingCpSat(CpSat):
    """CP-SAT in a process that lives as long as this one, and is asked no question twice.

    State, of the class: `_running`, the process and whose it is; `_known`, answers by question. Changed by whoever asks
    first.
    """

    _running: ClassVar[tuple[Any, int]] = (None, 0)
    _known: ClassVar[dict[str, tuple[frozenset[int], frozenset[int]]]] = {}

    def __enter__(self) -> CpSat:
        """The process is begun by the first question that is not known."""
        return self

    def __exit__(self, *_: object) -> None:
        """The process goes on; it ends with this one, whose end closes its input."""

    def _ask(self, keep_at_most_bytes: int | None, offload_s_per_byte: float | None) -> Any:
        question = json.dumps([_plain(self.graph), keep_at_most_bytes, offload_s_per_byte])
        if question not in self._known:
            self._child = self._process()
            self._known[question] = super()._ask(keep_at_most_bytes, offload_s_per_byte)
        return self._known[question]

    def _process(self) -> Any:
        kind = type(self)
        child, owner = kind._running
        # A child that was forked must not talk into its parent's pipes.
        if child is None or owner != os.getpid() or child.poll() is not None:
            super().__enter__()
            kind._running = self._child, os.getpid()
        return kind._running[0]


def _plain(graph: BlockGraph) -> list[Any]:
    ops = [(op.seconds, op.reads, op.makes, op.recomputable) for op in graph.ops]
    return [ops, [(s.bytes, s.external) for s in graph.storages], sorted(graph.saved)]


@contextlib.contextmanager
def one_cpsat() -> Iterator[None]:
    """Inside, options of block classes are asked of the lasting process."""
    with mock.patch.object(choices, "CpSat", _LastingCpSat):
        yield
