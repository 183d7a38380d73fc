"""Passes of several micro-batches, predicted: `python -m benchmarks.passes [--json FILE]`.

All seconds are predictions of the program, in fractions of tensors; nothing was run on such a machine. The model is
Llama-2-7B in bf16 with float32 copies, clipped, with the rates of the RTX 4090's file and 32 micro-batches per update.
The table says how many of them a pass should run before the next block. "tried" marks the number that the planner tries
beside one and all. The last line compares the fastest of these three with the fastest of all rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from offmate.solver.fat_steps import in_passes
from offmate.solver.passes import between
from offmate.solver.problem import Problem, update_steps
from offmate.solver.resources import Resource
from offmate.solver.solve import solve

from offmate.machines.hardware import load

from .desktop import GB, gated, problem_of
from .overhead import machine
from .tables import show

MICRO_BATCHES = 32
CASES = ((22, 120, 2048), (10, 130, 2048), (22, 125, 8192))  # GB on the GPU, GB of RAM, tokens per micro-batch
_LIMIT_S = 120.0  # for each solve


def main() -> None:
    """Predict, print, and write the table if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = list(_rows())
    show(f"Llama-2-7B, {MICRO_BATCHES} micro-batches, clipped, predicted", rows, ".3g")
    ratios = [_ratio([row for row in rows if row["case"] == case]) for case in dict.fromkeys(r["case"] for r in rows)]
    print("fastest of the three that are tried / fastest of all:", ", ".join(f"{ratio:.3f}" for ratio in ratios))
    if arguments.json:
        found = {"machine": machine(), "rows": rows, "tried / all": ratios}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def _rows() -> Iterator[dict[str, Any]]:
    for gpu_gb, ram_gb, tokens in CASES:
        plain = problem_of(load("rtx4090"), 1, tokens, gpu_gb * GB, whole_layers=True)
        plain = replace(plain, host_budget_bytes=ram_gb * GB, host_in_time=True)
        one = gated(plain, update_steps(plain.groups, plain.device_budget_bytes))
        rows = {k: _row(in_passes(one, MICRO_BATCHES, k)) for k in (1, 2, 4, 8, 16, MICRO_BATCHES)}
        ends = [rows[k]["update s"] for k in (1, MICRO_BATCHES)]
        best_s = min((seconds for seconds in ends if seconds is not None), default=inf)
        picked = between(in_passes(one, MICRO_BATCHES, 1), best_s, all_fit=ends[1] is not None)
        for k, row in rows.items():
            yield {
                "case": f"{gpu_gb} GB, {ram_gb} GB of RAM, {tokens} tokens",
                "per pass": k,
                "tried": "yes" if k in (1, MICRO_BATCHES, picked) else "",
                **row,
            }


def _row(problem: Problem) -> dict[str, Any]:
    found = solve(problem, time_limit_s=_LIMIT_S)
    busy = found.busy_s
    return {
        "update s": found.objective_s if found.options else None,
        "computes s": busy.get(Resource.COMPUTE),
        "copies in s": busy.get(Resource.IN),
        "copies out s": busy.get(Resource.OUT),
        "status": found.status.name.lower(),
        "solved in s": found.solve_s,
    }


def _ratio(rows: list[dict[str, Any]]) -> float:
    tried, best = (
        min(row["update s"] for row in rows if row["update s"] is not None and (row["tried"] or every))
        for every in (False, True)
    )
    return float(tried / best)


if __name__ == "__main__":
    main()
