"""OffMate's tables 1 and 2 beside our predictions: `python -m benchmarks.paper_tables [--json FILE] [--limit S]`.

Table 2: Llama2-7B in fp32 on the paper's two machines, with the paper's rates. Ours are predictions of the simulator
for synthetic chains whose computes are scaled to the paper's time without offloading, and whose activations to the
paper's size; nothing was run on such a card. Their blocks need about as much memory as captured ones, and no less: the
model as captured (`offmate plan llama2-7b --dtype fp32 --hardware offmate-rtx3060`), with fused attention and thus
fewer activations, has a least budget of 1.9 GB. The first rows keep the paper's restrictions (whole layers, interface
activations resident, H = 50 ms); the others lift them one at a time. In the row without CPU updates our figure is the
program's: host updates are so slow there that a single whole tensor, rounded up onto the host, would dominate the
simulator's. Table 1: see `paper_models.py` for the assumptions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offmate.solver.instances.synthetic import Shape, Speeds, llama
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, Rates
from offmate.solver.solve import least_budget

from offmate.machines.hardware import Hardware, load

from . import paper_models
from .tables import show

GB = 10**9
NO_HOST = "w/o CPU optim"
_SLOWER = 100.0  # host updates slower by this factor never pay off


@dataclass(frozen=True)
class Paper:
    """One machine of table 2: its batch, its activations, and per row the paper's seconds, VRAM and RAM."""

    machine: str
    batch: int
    activation_bytes: int
    base_s: float
    host_budget_bytes: int
    rows: dict[str, tuple[float, float, float]]


# The base time is OffMate's time divided by one plus its overhead.
PAPERS = (
    Paper(
        "offmate-rtx3060",
        4,
        int(40.8 * GB),
        13.5 / 1.137,
        128 * GB,
        {"OffMate": (13.5, 9.9, 99.0), "w/o CPU optim": (14.4, 9.1, 88.4), "w/o act offload": (15.7, 10.0, 96.2)},
    ),
    Paper(
        "offmate-rtx3090",
        8,
        int(81.7 * GB),
        10.3 / 1.243,
        256 * GB,
        {"OffMate": (10.3, 21.7, 111.3), "w/o CPU optim": (10.6, 21.2, 107.2), "w/o act offload": (11.8, 21.2, 103.5)},
    ),
)


def main() -> None:
    """Plan every row, print the table, write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per solve")
    arguments = parser.parse_args()
    second = [_row(paper, *case, arguments.limit) for paper in PAPERS for case in _cases(paper)]
    show("OffMate, table 2: theirs measured, ours predicted for synthetic chains", second, ".2f")
    speeds = _speeds(load("offmate-rtx3060"))
    first = list(paper_models.rows(speeds, _quick(speeds), arguments.limit))
    show(
        "OffMate, table 1: theirs measured; ours predicted for synthetic chains, batch and sequence assumed",
        first,
        ".2f",
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"table 1": first, "table 2": second}, indent=1) + "\n")


def _quick(speeds: Speeds) -> Speeds:
    """Return the speeds with our own management time of a step, most of which is launches."""
    return replace(speeds, rates=replace(speeds.rates, manage_s=0.001))


def _cases(paper: Paper) -> Iterator[tuple[str, Problem]]:
    """Yield the paper's three rows under its restrictions, then lift the restrictions one at a time."""
    budget = int(paper.rows["OffMate"][1] * GB)
    restricted = resident(_problem(paper, budget, whole_layers=True))
    yield "OffMate", restricted
    yield "with the paper's RAM", replace(restricted, host_budget_bytes=int(paper.rows["OffMate"][2] * GB))
    slow = tuple(replace(g, cpu_update_s=g.cpu_update_s * _SLOWER) for g in restricted.groups)
    yield NO_HOST, replace(restricted, groups=slow)
    kept = tuple(replace(b, options=tuple(o for o in b.options if not o.offloaded_bytes)) for b in restricted.blocks)
    yield "w/o act offload", replace(restricted, blocks=kept)
    yield "+ interfaces may leave", _problem(paper, budget, whole_layers=True)
    halves = _problem(paper, budget, whole_layers=False)
    yield "+ half layers", halves
    quick = replace(halves, rates=replace(halves.rates, manage_s=0.001))
    yield "+ H = 1 ms", quick
    yield "+ 6 GB", replace(quick, device_budget_bytes=6 * GB)


def _problem(paper: Paper, budget_bytes: int, *, whole_layers: bool) -> Problem:
    machine = load(paper.machine)
    shape = Shape(32, 4096, 11008, 32000, paper.batch, 512, attention_heads=32)
    return llama(
        shape,
        _speeds(machine),
        budget_bytes,
        paper.host_budget_bytes,
        whole_layers=whole_layers,
        iteration_s=paper.base_s,
        activation_bytes=paper.activation_bytes,
    )


def _speeds(machine: Hardware) -> Speeds:
    rates = Rates(machine.in_bytes_per_s, machine.out_bytes_per_s, machine.both_bytes_per_s, manage_s=machine.manage_s)
    return Speeds(
        machine.flops_per_s("float32"),
        machine.memory_bytes_per_s,
        machine.cpu_update_bytes_per_s,
        machine.device_update_bytes_per_s,
        rates,
    )


def resident(problem: Problem) -> Problem:
    """Return the problem in which the block that reads an interface value keeps it, so that it never leaves."""
    read = {value.uses[0]: value.bytes for value in problem.values}
    blocks = []
    for i, block in enumerate(problem.blocks):
        size = read.get(i, 0)
        options = tuple(
            replace(
                option,
                saved_bytes=option.saved_bytes + size,
                forward_peak_bytes=option.forward_peak_bytes + size,
                backward_peak_bytes=option.backward_peak_bytes + size,
            )
            for option in block.options
        )
        blocks.append(replace(block, options=options))
    return replace(problem, blocks=tuple(blocks), values=())


def _row(paper: Paper, name: str, problem: Problem, limit_s: float) -> dict[str, Any]:
    planned = plan(problem, time_limit_s=limit_s)
    paper_s, paper_gb, paper_ram_gb = paper.rows.get(name, (float("nan"),) * 3)
    seconds = planned.simulation.step_s if planned.simulation else float("inf")
    if name == NO_HOST:
        seconds = planned.solution.objective_s
    peak = planned.simulation.peak_bytes / GB if planned.simulation else float("nan")
    return {
        "machine": paper.machine,
        "row": name,
        "paper s": paper_s,
        "paper %": 100 * (paper_s / paper.base_s - 1),
        "paper GB, RAM": f"{paper_gb:g}, {paper_ram_gb:g}",
        "ours s": seconds,
        "ours %": 100 * (seconds / paper.base_s - 1),
        "program s": planned.solution.objective_s,
        "bound s": planned.solution.lower_bound_s,
        "GB": peak,
        "RAM": planned.schedule.tiers[0][1] / GB if planned.schedule else float("nan"),
        "least GB": least_budget(problem, gap=0.02, time_limit_s=limit_s).bytes / GB,
        "solve s": planned.solution.solve_s,
        "status": planned.solution.status.name,
    }


if __name__ == "__main__":
    main()
