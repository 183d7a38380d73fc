"""Seconds of the CPU that planning takes with and without files: `python -m benchmarks.solve_time [--json FILE]`.

The problems are those of `storage_plans`: Llama-2-7B with 22 GB of an RTX 4090's memory and one sequence of 2,048
tokens, with a drive of 7 and 5 GB/s. "one program" is one solve of the integer program that counts RAM in time, which
is the larger one. "whole plan" is all that `offmate.solver.plan.plan` does, with its searches for whole tensors. With
96 GiB of RAM there is a plan without files to compare with. With less there is none.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver.plan import plan
from offmate.solver.problem import Problem, update_steps
from offmate.solver.resources import Tier
from offmate.solver.solve import solve

from offmate.lowering.state_files import StateFiles
from offmate.machines.hardware import load

from .desktop import GB, gated, problem_of
from .tables import tell

_BUDGET_BYTES = 22 * GB
_FILES = StateFiles(7 * GB, 5 * GB, 12 * GB, 2000 * GB, 150 << 20)
_WITH: dict[str, tuple[Tier, ...]] = {
    "none": (),
    "states": (_FILES.tier,),
    "states and parameters": (replace(_FILES, for_parameters=True).tier,),
}
_REPEATS = 3  # of the solve of one program, whose median counts


def main() -> None:
    """Plan every row, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ram", type=int, nargs="*", default=(96, 48, 24), help="GiB of RAM, six rows each")
    arguments = parser.parse_args()
    tell("Seconds of the CPU, and in those without files", _rows(arguments.ram), arguments.json, width=150)


def _rows(sizes: list[int]) -> Iterator[dict[str, Any]]:
    plain = problem_of(load("rtx4090"), 1, 2048, _BUDGET_BYTES)
    for gate, problem in (("no", plain), ("yes", gated(plain, update_steps(plain.groups, _BUDGET_BYTES)))):
        for ram_gib in sizes:
            base: dict[str, float] = {}
            for files, tiers in _WITH.items():
                tried = replace(problem, host_budget_bytes=ram_gib << 30, rates=replace(problem.rates, tiers=tiers))
                in_time = replace(tried, host_in_time=True)
                programs_s = [_cpu_s(solve, in_time)[0] for _ in range(_REPEATS)]
                whole_s, found = _cpu_s(plan, tried)
                if found.simulation is None:
                    continue
                taken = {"one program s": statistics.median(programs_s), "whole plan s": whole_s}
                base = base or (taken if files == "none" else {})
                times = {f"times, {name[:-2]}": taken[name] / base[name] if base else None for name in taken}
                row = {"gate": gate, "RAM GiB": ram_gib, "in files": files, **taken, **times}
                yield row | {"simulated step s": found.simulation.step_s}


def _cpu_s(work: Callable[[Problem], Any], problem: Problem) -> tuple[float, Any]:
    """Return the CPU seconds of this process that a problem takes, and what is found."""
    before_s = time.process_time()
    found = work(problem)
    return time.process_time() - before_s, found


if __name__ == "__main__":
    main()
