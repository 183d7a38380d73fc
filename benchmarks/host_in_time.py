"""RAM that is shared in time: plans with less RAM than they take where there is plenty, with and without sharing.

`python -m benchmarks.host_in_time [--problems 6] [--json FILE]` plans published architectures on the machines whose
files come with offmate (those of `benchmarks.rounding`), first with plenty of RAM, then with 93 and 85 % of what that
plan takes. The table has the program's seconds if everything on the host has memory of its own and if what is there at
different times shares it, and the plan's simulated seconds; a dash where there is no plan.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from offmate.solver.solve import solve
from rich.console import Console
from rich.table import Table

from .rounding import KINDS, published

SHARES = (0.93, 0.85)


def main() -> None:
    """Plan, print the table, write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=6, help="random problems of each kind")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console, rows = Console(width=140), []
    table = Table("problem", "kind", "RAM", "plenty, s", "apart, s", "shared, s", "plan, s", "used", "planning, s")
    for kind, micro_batches in list(KINDS.items())[:2]:
        for seed in range(arguments.problems):
            label, problem = published(seed, micro_batches)
            for row in _measured(label, kind, replace(problem, host_budget_bytes=2**44)):
                rows.append(row)
                cells = (row[key] for key in ("plenty_s", "apart_s", "shared_s", "plan_s", "used", "planning_s"))
                shown = (f"{cell:.3g}" if cell is not None else "-" for cell in cells)
                table.add_row(label, kind, f"{100 * row['share']:.0f} %", *shown)
    console.print(table)
    if arguments.json is not None:
        about = {"machine": platform.processor() or platform.machine(), "rows": rows}
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")


def _measured(label: str, kind: str, problem: Problem) -> list[dict[str, Any]]:
    ample = plan(problem)
    if ample.schedule is None or ample.simulation is None:
        return []
    rows = []
    for share in SHARES:
        tight = replace(problem, host_budget_bytes=int(share * ample.schedule.host_bytes))
        started = time.perf_counter()
        found = plan(tight)
        planning_s = time.perf_counter() - started
        apart, shared = (solve(replace(tight, host_in_time=in_time)) for in_time in (False, True))
        rows.append({
            "problem": label, "kind": kind, "share": share, "plenty_s": ample.simulation.step_s,
            "apart_s": apart.objective_s if apart.options else None,
            "shared_s": shared.objective_s if shared.options else None,
            "plan_s": found.simulation.step_s if found.simulation else None,
            "used": found.schedule.host_layout.used_bytes / tight.host_budget_bytes if found.schedule else None,
            "planning_s": planning_s,
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
