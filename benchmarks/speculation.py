"""A clipping step of a 7B model with and without speculation: `python -m benchmarks.speculation [--json FILE]`.

All seconds are predictions, for the problems of `benchmarks/desktop.py`; nothing was run on such a card. "Gate": no
update starts before the last gradient. "Speculate": updates on the host may, with a log of the old values. These are
seconds of a step that clips nothing. "No gate" does not clip, and is a bound. Each is planned with the host memory of
`_HOSTS_BYTES`, and with the rate of host memory that the hardware file names or without any.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver import items
from offmate.solver.instances.synthetic import speculating
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, update_steps
from offmate.solver.schedule import Kind

from offmate.machines.hardware import load

from .desktop import CARDS, GB, gated, problem_of
from .overhead import machine
from .tables import show

BATCHES = ((4, 512), (8, 1024))
_HOSTS_BYTES = (512 * GB, 128 * GB)


def main() -> None:
    """Plan every row, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cards", nargs="*", default=[card for card, _ in CARDS])
    arguments = parser.parse_args()
    rows = list(_rows(arguments.cards))
    show("A step of Llama-2-7B that clips nothing, predicted", rows, ".2f")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def _rows(cards: list[str]) -> Iterator[dict[str, Any]]:
    for card, budget_bytes in CARDS:
        for batch, sequence in BATCHES if card in cards else ():
            free = problem_of(load(card), batch, sequence, budget_bytes)
            for host_bytes in _HOSTS_BYTES:
                for limited in (False, True):
                    rates = free.rates if limited else free.rates.with_endless_host_memory
                    problem = replace(free, rates=rates, host_budget_bytes=host_bytes)
                    case = {"card": card, "tokens": f"{batch} x {sequence}", "host GB": host_bytes // GB}
                    yield case | {"memory's rate": limited} | _planned(problem)


def _planned(free: Problem) -> dict[str, Any]:
    behind = gated(free, update_steps(free.groups, free.device_budget_bytes))
    found: dict[str, Any] = {}
    for name, problem in (("no gate", free), ("gate", behind), ("speculate", speculating(behind))):
        planned = plan(problem)
        assert planned.simulation is not None and planned.schedule is not None
        found |= {f"{name}: program s": planned.solution.objective_s, "simulated s " + name: planned.simulation.step_s}
        if name == "speculate":
            early = (a for a in planned.schedule.actions if a.kind is Kind.SPECULATE_CPU)
            found["log GB"] = sum(planned.schedule.item_bytes[items.log(a.name)] for a in early) / GB
    return found


if __name__ == "__main__":
    main()
