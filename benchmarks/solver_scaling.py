"""The growth of the integer program's solution time with the model, and the cost of its windows.

`python -m benchmarks.solver_scaling [--layers 8 16 32] [--backends highs cbc] [--full-layers 8 16] [--limit 60] [--out
FOLDER]` solves Llama-2-7B-like chains of half-layer blocks, at a budget that costs time and at one that costs hardly
any, prints a table and writes it as JSON, Markdown and a plot. For the models of `--full-layers` the program with every
step allowed is solved with the first backend, too, to the same gap.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from offmate.solver.instances.synthetic import Shape, Speeds, llama
from offmate.solver.problem import Problem, Rates
from offmate.solver.program import blocks as chain
from offmate.solver.program import groups as flows
from offmate.solver.program.model import state_program
from offmate.solver.solve import solve
from rich.console import Console
from rich.table import Table

from .overhead import machine

RESULTS = Path(__file__).parent / "results"
_SIZE = ("columns", "rows", "seconds")
COLUMNS = ("layers", "budget GB", "program", "backend", *_SIZE, "step s", "bound s", "gap %", "status")
BUDGETS_GB = (2.5, 4.0)  # 2.2 is the least for any number of layers
RATES = Rates(10.4e9, 10.4e9, 16.6e9, 0.001)

Row = dict[str, Any]


def main() -> None:
    """Solve, print a table, and write the results."""
    arguments = _arguments()
    console, results = Console(width=140), []
    for layers in arguments.layers:
        for budget in BUDGETS_GB:
            problem = instance(layers, int(budget * 1e9))
            for backend in arguments.backends:
                results.append(measure(problem, layers, backend, arguments.limit))
                console.print(*(_shown(value) for value in results[-1].values()), sep="  ")
            if layers in arguments.full_layers:
                results.append(measure(problem, layers, arguments.backends[0], arguments.limit, every_step=True))
    table = Table(*COLUMNS)
    for row in results:
        table.add_row(*(_shown(row[name]) for name in COLUMNS))
    console.print(table)
    _write(results, arguments)


def instance(layers: int, budget_bytes: int) -> Problem:
    """Return half-layer blocks of Llama-2-7B's width in fp32, with the rates of the paper's first machine."""
    shape = Shape(layers, 4096, 11008, 32000, batch=4, sequence=512)
    speeds = Speeds(6.5e12, 3e11, 1.1e9, 16.6e9, RATES)
    return llama(shape, speeds, budget_bytes, 10**13)


def measure(problem: Problem, layers: int, backend: str, limit_s: float, *, every_step: bool = False) -> Row:
    """Measure one row of the table; seconds include building the program.

    Parameters
    ----------
    every_step: whether to solve the full program, without windows.
    """
    if every_step:
        every = patch.object(flows, "sparse_offsets", lambda n, n_steps: list(range(n)))
        with every, patch.object(chain, "STEPS", problem.n_steps):
            return measure(problem, layers, backend, limit_s) | {"program": "every step"}
    model = state_program(problem).model
    started = time.perf_counter()
    solution = solve(problem, time_limit_s=limit_s, backend=backend)
    spent_s, found = time.perf_counter() - started, bool(solution.options)
    figures = (len(model.upper), len(model.rows), spent_s, solution.objective_s if found else None)
    more = (solution.lower_bound_s, 100 * solution.gap if found else None, solution.status.name)
    return dict(zip(COLUMNS, (layers, problem.device_budget_bytes / 1e9, "windows", backend, *figures, *more)))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) > 1e-3 else f"{value:.1e}" if value else "0"
    return "-" if value is None else str(value)


def _write(results: list[Row], arguments: argparse.Namespace) -> None:
    found = {"machine": machine(), "limit_s": arguments.limit, "rows": results}
    arguments.out.mkdir(parents=True, exist_ok=True)
    base = arguments.out / "solver-scaling"
    base.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    rows = [COLUMNS, ("---:",) * len(COLUMNS), *([_shown(row[name]) for name in COLUMNS] for row in results)]
    base.with_suffix(".md").write_text("".join(f"| {' | '.join(row)} |\n" for row in rows))
    _plot([row for row in results if row["program"] == "windows"], base.with_suffix(".svg"))


def _plot(rows: list[Row], path: Path) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise SystemExit('the plot needs matplotlib; try: pip install -e ".[viz]"') from None
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for backend in sorted({row["backend"] for row in rows}):
        own = [row for row in rows if row["backend"] == backend]
        layers = sorted({row["layers"] for row in own})
        slowest = [max(row["seconds"] for row in own if row["layers"] == n) for n in layers]
        axes.plot(layers, slowest, marker="o", label=backend)
    for layers, aim_s in ((32, 3), (80, 10)):
        axes.plot(layers, aim_s, marker="_", markersize=20, color="black", label="aim" if layers == 32 else None)
    axes.set(xlabel="layers (two blocks each)", ylabel="seconds, slower of two budgets", xscale="log", yscale="log")
    ticks = sorted({row["layers"] for row in rows})
    axes.set_xticks(ticks, [str(n) for n in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.legend()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver_scaling", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 48, 80, 128])
    parser.add_argument("--backends", nargs="+", default=["highs", "cbc"], choices=["highs", "cbc"])
    parser.add_argument(
        "--full-layers", type=int, nargs="*", default=[8, 16], help="models solved with every step allowed, too"
    )
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per solve (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="(default: benchmarks/results)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
