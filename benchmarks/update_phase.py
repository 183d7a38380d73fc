"""The update phase of Deep Optimizer States: its equation 1 and its forced shares, compared with the program's choice.

`python -m benchmarks.update_phase [--json FILE] [--limit 60]` plans 24 subgroups of 100 M parameters behind a gate,
with the throughputs that the paper gives for its V100 machine, and then with one thing changed at a time. k counts the
subgroups updated on the host for every one brought to the device and back. All seconds are predictions. Theirs are
equation 1's balance with the stride rounded to the better neighbour, without the time to fill the pipeline. Ours are
the program's, in fractions of subgroups, and the simulated schedule's, in whole ones.

The second table forces the device's share of the updates, as the paper's figures 15 and 16 do, evenly spread as by its
stride; everything else stays the program's to decide. It adds the machine of those figures, one of its four H100s:
55 GB/s each way (section 5.1), 25 and 2 billion updates per second (section 1, over four), casts at 62 GB/s (table 1).
A share that the memory has no room for has no seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver.instances.update_phase import Throughputs, forced, ratio, stride, stride_s, update_phase
from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from rich.console import Console
from rich.table import Table

from .overhead import machine

V100 = Throughputs(link=3e9, cpu_update=2e9, cpu_cast=8.7e9, device_update=35e9)  # Deep Optimizer States, section 5
H100 = Throughputs(link=55e9 / 4, cpu_update=2e9, cpu_cast=62e9 / 4, device_update=25e9)
SHARES = ((0, 1), (1, 4), (1, 3), (1, 2), (1, 1))  # of the subgroups, updated on the device


def main() -> None:
    """Plan every row, print the table, write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per solve")
    arguments = parser.parse_args()
    ratios = [_row(*case, arguments.limit) for case in _cases()]
    shares = [shares_row(name, problem, arguments.limit) for name, problem in _machines()]
    _print("Host updates for one on the device, and seconds: equation 1 and ours, predicted", ratios)
    _print("Seconds with a forced share of updates on the device: whole subgroups, and (fractions), predicted", shares)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine(), "equation 1": ratios, "shares": shares}, indent=1) + "\n"
        )


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console(width=165).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]:.2f} ({value[1]:.2f})" if value else "no room"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _cases() -> Iterator[tuple[str, Throughputs, Problem]]:
    """Yield the case in which equation 1's assumptions hold, then cases in which one of them does not."""
    yield "as equation 1 assumes", V100, update_phase(V100, room=1.01)
    yield "subgroups of four tensors", V100, update_phase(V100, room=1.01, tensors=4)
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


def _machines() -> Iterator[tuple[str, Problem]]:
    """Yield the cases of the first table, then room for more states, in which all may be updated on the device."""
    for name, _, problem in _cases():
        yield name, problem
    yield "room for 3 of 24 states", update_phase(V100, room=3)
    yield "an H100", update_phase(H100, room=1.01)
    yield "an H100, room for 3", update_phase(H100, room=3)


def shares_row(name: str, problem: Problem, limit_s: float = 60.0) -> dict[str, Any]:
    """Return seconds of the program's own choice and of every forced share: in whole subgroups, and in fractions."""
    own = _seconds(problem, limit_s)
    shares = {f"{100 * part // whole} %": _seconds(forced(problem, (part, whole)), limit_s) for part, whole in SHARES}
    least = [min(column) for column in zip(*filter(None, shares.values()))]
    return {"case": name, "own choice": own, **shares, "own / best": [a / b for a, b in zip(own, least)]}


def _seconds(problem: Problem, limit_s: float) -> list[float]:
    """Return both seconds; none if there is no plan."""
    planned = plan(problem, time_limit_s=limit_s, gap=1e-3)
    return [planned.simulation.step_s, planned.solution.objective_s] if planned.simulation else []


if __name__ == "__main__":
    main()
