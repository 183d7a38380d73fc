"""What whole tensors cost: the simulated schedule against the integer program, over random problems.

`python -m benchmarks.rounding [--problems 40] [--json FILE]` plans Llama-like chains of random shapes, precisions,
machines and budgets, with updates as gradients come, behind a gate, and with four micro-batches per update, and prints
the ratio of simulated seconds to the program's: for all, and for those in which no tensor's state takes more than a
tenth of an iteration on the link.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver.plan import plan
from offmate.solver.problem import Problem, Rates
from offmate.solver.solve import least_budget, solve
from offmate.solver.synthetic import Precision, Shape, Speeds, llama
from rich.console import Console
from rich.table import Table

KINDS = {"as gradients come": 0, "behind a gate": 1, "four micro-batches": 4}
SMALL = 0.1  # of an iteration: the copy of the largest state


def main() -> None:
    """Plan, print the table, write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=40, help="random problems of each kind")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for kind, batches in KINDS.items():
        ratios = [measure(instance(random.Random(seed), batches)) for seed in range(arguments.problems)]
        rows.append(_row(kind, [ratio for ratio, _ in ratios]))
        rows.append(_row(f"{kind}, small tensors", [ratio for ratio, largest in ratios if largest <= SMALL]))
    table = Table(*rows[0], title="Simulated seconds, in those of the program")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


def instance(rng: random.Random, micro_batches: int) -> Problem:
    """A random problem with a budget between the least and an ample one; without a gate if `micro_batches` is 0."""
    hidden, link = rng.choice([512, 1024, 2048, 4096]), rng.choice([4e9, 1.2e10, 2.5e10])
    shape = Shape(
        rng.randint(4, 10),
        hidden,
        int(hidden * rng.choice([2.7, 3.5, 4])),
        rng.choice([8000, 32000, 128000]),
        rng.choice([1, 2, 4]),
        rng.choice([256, 512, 1024, 2048]),
        kv_hidden=hidden // rng.choice([1, 4]),
        gated=rng.random() < 0.7,
        tied=rng.random() < 0.3,
    )
    rates = Rates(link, link * rng.choice([0.8, 1]), link * rng.choice([1.2, 1.6, 2]), rng.choice([0, 5e-4, 1e-3]))
    host, device = rng.choice([5e8, 1e9, 3e9]), rng.choice([2e10, 5e10])
    speeds = Speeds(rng.choice([5e12, 2e13, 6e13]), rng.choice([3e11, 9e11]), host, device, rates)
    problem = llama(shape, speeds, 10**13, 10**14, precision=rng.choice([Precision(), Precision(2, 2, 12, 2)]))
    if micro_batches:
        adds = {g.name: (g.cpu_update_s / 4, g.device_update_s / 4) for g in problem.groups}
        groups = tuple(replace(g, cpu_add_s=adds[g.name][0], device_add_s=adds[g.name][1]) for g in problem.groups)
        problem = replace(problem, groups=groups, gate=True, gate_s=1e-3, micro_batches=micro_batches)
    least, ample = least_budget(problem).bytes, max(solve(problem).memory_bytes)
    return replace(problem, device_budget_bytes=int(least * 1.02 + rng.random() * max(0, ample - least)))


def measure(problem: Problem) -> tuple[float, float]:
    """Simulated seconds over the program's, and the part of an iteration that the largest state's copy takes."""
    planned = plan(problem)
    assert planned.simulation is not None, planned.solution.status.value
    largest = max(t.state_bytes for group in problem.groups for t in group.tensors)
    copy_s = largest / min(problem.rates.in_bytes_per_s, problem.rates.out_bytes_per_s)
    seconds = planned.solution.objective_s
    return planned.simulation.step_s / seconds, copy_s / seconds


def _row(kind: str, ratios: list[float]) -> dict[str, Any]:
    ordered = sorted(ratios)
    parts = {"median": 0.5, "80 %": 0.8, "95 %": 0.95, "worst": 1.0}
    found = {
        name: ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else ""
        for name, part in parts.items()
    }
    within = f"{sum(ratio <= 1.05 for ratio in ordered) / max(len(ordered), 1):.0%}"
    return {"kind": kind, "problems": len(ordered), **found, "within 5 %": within}


if __name__ == "__main__":
    main()
