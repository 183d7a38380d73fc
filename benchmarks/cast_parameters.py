"""Parameters that are cast from their float32 copies, predicted: `python -m benchmarks.cast_parameters [--json FILE]`.

All seconds are predictions for a synthetic chain of half-layer blocks (Llama-2-7B in bf16 with float32 copies) and the
rates of the RTX 4090's file, with 22 GB of GPU memory, one sequence of 2,048 tokens and a drive of 7 and 5 GB/s at once
that takes states and parameters; nothing was run on such a machine. "in RAM": parameters are in RAM, or in files beside
their states. "cast": those that the host updates in RAM may be there as float32 copies alone. A row takes some minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver.items import parameter
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, update_steps

from offmate.lowering.float32_copies import tier_of
from offmate.lowering.state_files import StateFiles
from offmate.machines.hardware import load

from .desktop import GB, gated, problem_of
from .tables import tell

_BUDGET_BYTES = 22 * GB
_DRIVE = StateFiles(7 * GB, 5 * GB, 12 * GB, 2000 * GB, 150 << 20, for_parameters=True)


def main() -> None:
    """Plan every row, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ram", type=int, nargs="*", default=(24, 32, 48), help="GiB of RAM, one row each and gate")
    arguments = parser.parse_args()
    tell("A step of Llama-2-7B with states on a drive, predicted", _rows(arguments.ram), arguments.json, width=170)


def _rows(sizes: list[int]) -> Iterator[dict[str, Any]]:
    for ram_gib in sizes:
        plain = problem_of(load("rtx4090"), 1, 2048, _BUDGET_BYTES)
        groups = tuple(replace(group, has_copies=True) for group in plain.groups)
        plain = replace(plain, host_budget_bytes=ram_gib << 30, host_in_time=True, groups=groups)
        copies = tier_of(groups, on_host=False)
        assert copies is not None
        plain = replace(plain, rates=replace(plain.rates, tiers=(_DRIVE.tier, copies)))
        for gate, problem in (("no", plain), ("yes", gated(plain, update_steps(plain.groups, _BUDGET_BYTES)))):
            row: dict[str, Any] = {"RAM GiB": ram_gib, "gate": gate}
            for word, one in (("in RAM", problem.without_casts), ("cast", problem)):
                row |= {f"{word}: {name}": figure for name, figure in _figures(one).items()}
            yield row | {"cast / in RAM": row["cast: simulated s"] / row["in RAM: simulated s"]}


def _figures(problem: Problem) -> dict[str, float]:
    started = time.perf_counter()
    found = plan(problem)
    assert found.schedule is not None and found.simulation is not None
    cast = sum(found.schedule.item_bytes[parameter(name)] for name in found.schedule.cast_parameters)
    return {
        "simulated s": found.simulation.step_s,
        "program s": found.solution.objective_s,
        "cast GB": cast / GB,
        "files GB": found.schedule.most_bytes_in_files / GB,
        "planned in s": time.perf_counter() - started,
    }


if __name__ == "__main__":
    main()
