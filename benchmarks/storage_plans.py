"""Full fine-tuning with optimizer states on a drive, predicted: `python -m benchmarks.storage_plans [--json FILE]`.

All seconds are predictions for synthetic chains of half-layer blocks (the shapes of Llama-2-7B and 13B, bf16 with
float32 copies, 14 bytes per parameter beside gradients) and the rates of the RTX 4090's file, with 22 GB of GPU memory
and one sequence of 2,048 tokens; nothing was run on such a machine. The drives: one whose reads (7 GB/s) and writes (5)
do not slow each other down, one on which they take turns (5.8 GB/s in all), and a consumer drive once its fast cache is
full (1.4 GB/s of sustained writes, in turns with reads). "Bound" is the least that the drive can take for what the plan
keeps there, as if nothing else took time. Each row takes one or two minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver.plan import plan
from offmate.solver.problem import Problem, update_steps

from offmate.lowering.state_files import StateFiles
from offmate.machines.hardware import load

from .desktop import GB, gated, problem_of
from .tables import tell

_BUDGET_BYTES = 22 * GB
_BUFFERS_BYTES = 150 << 20
_CAPACITY_BYTES = 2000 * GB
_FIGURES = (
    "stored GB", "RAM used GiB", "bound s", "program s", "simulated s", "of the program", "TB written per 1,000",
    "solved in s",
)  # fmt: skip
MODELS = (("7B", 32, 4096, 24), ("13B", 40, 5120, 48))  # name, layers, width, GiB of RAM
DRIVES = (("7 and 5 at once", 7.0, 5.0, 12.0), ("7 and 5 in turns", 7.0, 5.0, 5.8), ("sustained", 7.0, 1.4, 2.33))


def main() -> None:
    """Plan every row, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tell("A step with states on a drive, predicted", _rows(), arguments.json, width=170)


def _rows() -> Iterator[dict[str, Any]]:
    for model, layers, hidden, ram_gib in MODELS:
        plain = problem_of(load("rtx4090"), 1, 2048, _BUDGET_BYTES, layers, hidden)
        plain = replace(plain, host_budget_bytes=ram_gib << 30, host_in_time=True)
        needed = update_steps(plain.groups, _BUDGET_BYTES)
        for gate, problem in (("no", plain), ("yes", gated(plain, needed))):
            without = plan(problem)
            for drive, *rates in DRIVES:
                case = {"model": model, "RAM GiB": ram_gib, "gate": gate, "drive": drive}
                fits = "yes" if without.schedule is not None else "no"
                yield case | {"fits without": fits} | _planned(problem, *(rate * GB for rate in rates))


def _planned(problem: Problem, read: float, write: float, both: float) -> dict[str, Any]:
    tier = StateFiles(read, write, both, _CAPACITY_BYTES, _BUFFERS_BYTES).tier
    started = time.perf_counter()
    found = plan(replace(problem, rates=replace(problem.rates, tiers=(tier,))))
    planned_s = time.perf_counter() - started
    if found.schedule is None or found.simulation is None:
        return dict.fromkeys(_FIGURES, "no plan") | {"planned in s": planned_s}
    ((_, host_bytes), (_, stored)) = found.schedule.tiers
    program_s, simulated_s = found.solution.objective_s, found.simulation.step_s
    figures = (
        stored / GB,
        host_bytes / 2**30,
        max(stored / read, stored / write, 2 * stored / both),
        program_s,
        simulated_s,
        simulated_s / program_s,
        stored / 1e9,
        found.solution.solve_s,
    )
    return {**dict(zip(_FIGURES, figures)), "planned in s": planned_s}


if __name__ == "__main__":
    main()
