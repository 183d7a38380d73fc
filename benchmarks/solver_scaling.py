"""How long the integer program takes as models grow, and what its windows cost.

`python -m benchmarks.solver_scaling [--layers 8 16 32] [--backends highs cbc] [--full-layers 8] [--json FILE]
[--plot FILE]` solves synthetic Llama-2-7B-like chains of half-layer blocks at a tight and a roomy budget.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from offmate.solver import flows
from offmate.solver.model import state_program
from offmate.solver.problem import Problem, Rates
from offmate.solver.solve import solve
from offmate.solver.synthetic import Shape, Speeds, llama
from rich.console import Console
from rich.table import Table

COLUMNS = ("layers", "budget", "program", "backend", "columns", "rows", "seconds", "step s", "gap", "status")
BUDGETS_GB_PER_LAYER = (0.15, 0.5)  # of about 2.1 GB that a layer's states and activations take
RATES = Rates(10.4e9, 10.4e9, 16.6e9, 0.001)


def main() -> None:
    """Solve, print a table, and write what was asked for."""
    arguments = _arguments()
    results = []
    for layers in arguments.layers:
        for per_layer in BUDGETS_GB_PER_LAYER:
            problem = instance(layers, int((2.5 + per_layer * layers) * 1e9))
            for backend in arguments.backends:
                results.append(measure(problem, layers, backend, "windows", arguments.limit))
                if layers in arguments.full_layers:
                    with patch.object(flows, "sparse_offsets", lambda n: list(range(n))):
                        results.append(measure(problem, layers, backend, "full", arguments.limit))
    table = Table(*COLUMNS)
    for result in results:
        table.add_row(*(_shown(result[name]) for name in COLUMNS))
    Console(width=120).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.plot:
        _plot(results, arguments.plot)


def instance(layers: int, budget_bytes: int) -> Problem:
    """Half-layer blocks of Llama-2-7B's width in fp32, with the rates of the paper's first machine."""
    shape = Shape(layers, 4096, 11008, 32000, batch=4, sequence=512)
    speeds = Speeds(6.5e12, 3e11, 1.1e9, 16.6e9, RATES)
    return llama(shape, speeds, budget_bytes, 10**13)


def measure(problem: Problem, layers: int, backend: str, program: str, limit_s: float) -> dict[str, Any]:
    """One row of the table; seconds include stating the program."""
    model = state_program(problem).model
    started = time.perf_counter()
    solution = solve(problem, time_limit_s=limit_s, backend=backend)
    row = (
        layers,
        f"{problem.device_budget_bytes / 1e9:.1f} GB",
        program,
        backend,
        len(model.upper),
        len(model.rows),
        time.perf_counter() - started,
        solution.objective_s,
        solution.gap,
        solution.status.name,
    )
    return dict(zip(COLUMNS, row))


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plot(results: list[dict[str, Any]], path: Path) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise SystemExit('the plot needs matplotlib; try: pip install "offmate[viz]"') from None
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for backend, program in sorted({(r["backend"], r["program"]) for r in results}):
        rows = [r for r in results if (r["backend"], r["program"]) == (backend, program)]
        layers = sorted({r["layers"] for r in rows})
        slowest = [max(r["seconds"] for r in rows if r["layers"] == n) for n in layers]
        axes.plot(layers, slowest, marker="o", label=f"{backend}, {program}")
    axes.set(xlabel="layers (two blocks each)", ylabel="seconds, slower of two budgets", xscale="log", yscale="log")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 48, 80, 128])
    parser.add_argument("--backends", nargs="+", default=["highs"], choices=["highs", "cbc"])
    parser.add_argument("--full-layers", type=int, nargs="*", default=[8])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per solve")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
