"""The house from the ground up: which room may import which, and what a census of it finds."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import networkx

from .imports import ROOT, arrows, folder_of, modules

# Data and entry points stand at a package's root, mechanisms in its folders. A room imports itself and rooms above.
ROOMS = (
    "offmate.errors",  # what is refused; everything else may raise it
    "offmate.libraries",  # what each is for; everything else may load one
    "offmate.sizes",  # bytes as users write and read them
    # solver: plain numbers, no torch
    "offmate.solver",
    "offmate.solver.resources",
    "offmate.solver.sharing",
    "offmate.solver.steps",
    "offmate.solver.compute_names",
    "offmate.solver.rows",
    "offmate.solver.checks",
    "offmate.solver.problem",
    "offmate.solver.fat_steps",
    "offmate.solver.block_graph",
    "offmate.solver.items",
    "offmate.solver.handed",
    "offmate.solver.solution",
    "offmate.solver.linear",
    "offmate.solver.answer",
    "offmate.solver.actions",
    "offmate.solver.schedule",
    "offmate.solver.returns",
    "offmate.solver.decisions",
    "offmate.solver.machine",
    "offmate.solver.effects",
    "offmate.solver.simulate",
    "offmate.solver.missed",
    "offmate.solver.backends",
    "offmate.solver.options",
    "offmate.solver.program",
    "offmate.solver.scheduling",
    "offmate.solver.rounding",
    "offmate.solver.polish",
    "offmate.solver.solve",
    "offmate.solver.refine",
    "offmate.solver.algorithm_1",
    "offmate.solver.refinements",
    "offmate.solver.plan",
    "offmate.solver.own_process",
    "offmate.solver.batch_size",
    "offmate.solver.passes",
    "offmate.solver.accumulation",
    "offmate.solver.explain",
    "offmate.solver.files",
    "offmate.solver.old_text",
    "offmate.solver.text",
    "offmate.solver.instances",
    # runtime: replays a schedule on a device
    "offmate.runtime",
    "offmate.runtime.torch_names",
    "offmate.runtime.current",
    "offmate.runtime.events",
    "offmate.runtime.layouts",
    "offmate.runtime.ledger",
    "offmate.runtime.clocks",
    "offmate.runtime.trace",
    "offmate.runtime.interrupts",
    "offmate.runtime.memory",
    "offmate.runtime.storage",
    "offmate.runtime.devices",
    "offmate.runtime.operators",
    "offmate.runtime.replay",
    # offmate: from a model and a batch to a plan, and a session that trains by it
    "offmate.files",
    "offmate.split",
    "offmate.version",
    "offmate.config",
    "offmate.moving_line",
    "offmate.progress",
    "offmate.transformers_names",
    "offmate.machines",
    "offmate.reports",
    "offmate.guards",
    "offmate.capture",
    "offmate.optim",
    "offmate.programs",
    "offmate.lowering",
    "offmate.profile",
    "offmate.plans",
    "offmate.planning",
    "offmate.session",
    "offmate.arguments",
    "offmate.api",
    "offmate.casting",
    "offmate",
    "offmate.integrations",
    "offmate.check",
    "offmate.finetune",
    "offmate.cli",
    "offmate.__main__",
)
_FLOOR = {room: floor for floor, room in enumerate(ROOMS)}

# What a new tier, link, kind of item or order of micro-batches has to be told to, as it is spelt in a source.
CONCEPTS = {
    "the host's capacity": r"\bhost_budget_bytes\b",
    "in or out as a link": r"\b(in|out|both)_bytes_per_s\b|\blink_(in|out)\b",
    "prefixes of items": r"[\"'](?:p|g|t|s|v|d|k|a|x|o|old):|\bf\"[pgtsvdkaxo]:\{",
    "arithmetic of passes": (
        r"\b(pass_steps|n_passes|backward_step)\b|\b(problem|schedule)\.(passes|lead|micro_batches)\b"
    ),
}


def room_of(module: str) -> str:
    """The room that a module stands in: its own, or that of the nearest folder."""
    parts = module.split(".")
    if len(parts) == 1:
        return module
    for end in range(len(parts), 1, -1):
        if (room := ".".join(parts[:end])) in _FLOOR:
            return room
    raise KeyError(f"{module} has no place in the house; give it one in tests/house/order.py")


def upward() -> list[tuple[str, str]]:
    """Imports that run up."""
    return sorted((a, b) for a, b in arrows() if _FLOOR[room_of(b)] > _FLOOR[room_of(a)])


def circles() -> list[list[str]]:
    """Modules that import each other, round about or at once."""
    graph: networkx.DiGraph[str] = networkx.DiGraph(list(arrows()))
    return [sorted(part) for part in networkx.strongly_connected_components(graph) if len(part) > 1]


def mentions(pattern: str) -> list[Path]:
    """Sources in which a pattern occurs."""
    return [path for path in modules().values() if re.search(pattern, path.read_text())]


def census() -> list[str]:
    """Lines that say how the house stands."""
    per_folder = Counter(map(folder_of, modules()))
    lines = [f"{len(modules())} modules, {len(arrows())} arrows"]
    lines += [f"{count:5} modules in {folder}" for folder, count in sorted(per_folder.items())]
    lines += [f"{len(circles()):5} circles", f"{len(upward()):5} arrows that run up"]
    lines += [f"{a} imports {b}, which stands higher" for a, b in upward()]
    lines += [f"a circle: {', '.join(circle)}" for circle in circles()]
    for concept, pattern in CONCEPTS.items():
        found = mentions(pattern)
        folders = Counter(path.relative_to(ROOT).parts[0] for path in found)
        where = ", ".join(f"{count} in {folder}" for folder, count in folders.items())
        lines.append(f"{len(found):5} files mention {concept} ({where})")
    return lines
