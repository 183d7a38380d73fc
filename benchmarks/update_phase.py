"""The update phase of Deep Optimizer States: its equation 1 compared with the integer program's decisions.

`python -m benchmarks.update_phase [--json FILE] [--limit 60]` plans 24 subgroups of 100 M parameters behind a gate,
with the throughputs that the paper gives for its V100 machine, and then with one thing changed at a time. k counts the
subgroups updated on the host for every one brought to the device and back. All seconds are predictions. Theirs are
equation 1's balance with the stride rounded to the better neighbour, without the time to fill the pipeline. Ours are
the program's, in fractions of subgroups, and the simulated schedule's, in whole ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver.instances.update_phase import Throughputs, ratio, stride, stride_s, update_phase
from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from rich.console import Console
from rich.table import Table

V100 = Throughputs(link=3e9, cpu_update=2e9, cpu_cast=8.7e9, device_update=35e9)  # Deep Optimizer States, section 5


def main() -> None:
    """Plan every row, print the table, write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per solve")
    arguments = parser.parse_args()
    results = [_row(*case, arguments.limit) for case in _cases()]
    table = Table(*results[0], title="Host updates for one on the device, and seconds: equation 1 and ours, predicted")
    for result in results:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in result.values()))
    Console(width=165).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def _cases() -> Iterator[tuple[str, Throughputs, Problem]]:
    """Yield the case in which equation 1's assumptions hold, then cases in which one of them does not."""
    yield "as equation 1 assumes", V100, update_phase(V100, room=1.01)
    quick = replace(V100, link=6.25e9)
    yield "a link of 25 GB/s", quick, update_phase(quick, room=1.01)
    slow = replace(V100, cpu_update=1e9)
    yield "a host half as fast", slow, update_phase(slow, room=1.01)
    late = replace(V100, device_update=3e9)
    yield "slow device updates", late, update_phase(late, room=1.01)
    yield "room for 6 of 24 states", V100, update_phase(V100, room=6)
    yield "one direction at a time", V100, update_phase(V100, room=1.01, both=1.0)
    yield "behind 3 s of computes", V100, update_phase(V100, room=1.01, compute_s=3.0)


def _row(name: str, machine: Throughputs, problem: Problem, limit_s: float) -> dict[str, Any]:
    planned = plan(problem, time_limit_s=limit_s, gap=1e-3)
    assert planned.schedule is not None and planned.simulation is not None, planned.solution.status.value
    computes_s = sum(option.forward_s + option.backward_s for block in problem.blocks for option in block.options)
    return {
        "case": name,
        "k of equation 1": stride(machine),
        "k, device updates hidden": stride(replace(machine, device_update=float("inf"))),
        "its seconds": stride_s(machine, problem.n_blocks) + computes_s,
        "our k": ratio(planned.solution),
        "our program's seconds": planned.solution.objective_s,
        "our schedule's seconds": planned.simulation.step_s,
        "subgroups on the host": len(planned.schedule.update_cpu_s),
    }


if __name__ == "__main__":
    main()
