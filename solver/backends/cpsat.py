"""Exact choice, with CP-SAT, of the storages of a block to keep or offload."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...libraries import broken, missing
from . import BackendError

if TYPE_CHECKING:
    from ..block_graph import BlockGraph

RESOLUTION = 10**6  # integer units of cost that the most expensive plan has
_AGAIN = "again, and report it if the same comes again"
ABSENT = 78  # exit code of the process if CP-SAT cannot be loaded there
CHILD = Path(__file__).with_name("cpsat_child.py")


class CpSat:
    """Answers questions about block graphs from a separate process, begun by the first and ended by the `with` block.

    Every answer lists the storages to keep and those to offload. Where a block is so large that CP-SAT's effort ends
    without an answer, it is a choice that is always possible: offload all that is saved, or recompute what can be.
    """

    def __init__(self) -> None:
        self._child: Any = None
        self._said: Any = None

    def __enter__(self) -> CpSat:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()  # it holds nothing, and would take a while to end by itself
            self._child.communicate()
            self._said.close()

    def least_kept(self, graph: BlockGraph) -> tuple[frozenset[int], frozenset[int]]:
        """Minimise the bytes kept such that everything else can be recomputed; nothing is offloaded."""
        return self._ask(graph, None, None)

    def fastest(
        self, graph: BlockGraph, keep_at_most_bytes: int, offload_s_per_byte: float | None
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Minimise the seconds of recomputation and of copies.

        Parameters
        ----------
        keep_at_most_bytes: limit on the bytes kept.
        offload_s_per_byte: cost of a byte that leaves and returns; None if nothing may leave.
        """
        return self._ask(graph, keep_at_most_bytes, offload_s_per_byte)

    def _ask(
        self, graph: BlockGraph, keep_at_most_bytes: int | None, offload_s_per_byte: float | None
    ) -> tuple[frozenset[int], frozenset[int]]:
        question = _question(graph, offload_s_per_byte) | {"keep_at_most_bytes": keep_at_most_bytes}
        child = self._running()
        try:
            print(json.dumps(question), file=child.stdin, flush=True)
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        try:
            found = json.loads(line)
            return frozenset(found["keep"]), frozenset(found["offload"])
        except (ValueError, TypeError, KeyError):
            raise BackendError(self._last_words(line)) from None

    def _last_words(self, line: str) -> str:
        """Say why the process gave no answer."""
        if line:
            return f"CP-SAT's process returned {line.strip()[:200]!r}, which is not a valid answer; try: {_AGAIN}"
        self._child.wait()
        self._said.seek(0)
        words = self._said.read().strip().splitlines()
        code = self._child.returncode
        last = words[-1] if words else f"exit code {code} and no message"
        if code == ABSENT:
            return missing("ortools") if last.endswith("'ortools'") else broken("ortools", last)
        return f"CP-SAT ended: {last}; try: {_AGAIN}"

    def _running(self) -> Any:
        """Return the process, begun if there is none: to load CP-SAT takes longer than most of its answers."""
        if self._child is None:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(p) for p in sys.path if p)}
            # A file: nobody reads a pipe before the end, and one that is full would stop the process.
            self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._said}
            command = [sys.executable, "-P", str(CHILD)]  # -P: modules in this folder must not shadow others
            self._child = subprocess.Popen(command, text=True, env=environment, **pipes)
        return self._child


def _question(graph: BlockGraph, offload_s_per_byte: float | None) -> dict[str, Any]:
    """Return the graph as plain numbers: its own storages by index, and costs in integer units."""
    sizes = [(j, graph.storages[j].bytes) for j in sorted(graph.maker)]
    ops = [(a, op) for a, op in enumerate(graph.ops) if op.recomputable]
    copies_s = [] if offload_s_per_byte is None else [(j, size * offload_s_per_byte) for j, size in sizes]
    unit_s = (sum(op.seconds for _, op in ops) + sum(s for _, s in copies_s)) / RESOLUTION or 1.0
    return {
        "sizes": sizes,
        "maker": sorted(graph.maker.items()),
        "saved": sorted(graph.own(graph.saved)),
        "again": [(a, round(op.seconds / unit_s), sorted(graph.own(op.reads))) for a, op in ops],
        "offload_costs": [(j, round(seconds / unit_s)) for j, seconds in copies_s],
        "otherwise": _possible(graph, offload_s_per_byte is not None),
    }


def _possible(graph: BlockGraph, offloads: bool) -> dict[str, list[int]]:
    """Return a choice that is possible whatever the costs: offload all that is saved, or recompute all that can be."""
    waiting = sorted(graph.own(graph.saved))
    if offloads:
        return {"keep": [], "offload": waiting}
    needed: set[int] = set()
    while waiting:
        j = waiting.pop()
        if j not in needed:
            needed.add(j)
            op = graph.ops[graph.maker[j]]
            waiting += graph.own(op.reads) if op.recomputable else ()
    return {"keep": sorted(j for j in needed if not graph.ops[graph.maker[j]].recomputable), "offload": []}
