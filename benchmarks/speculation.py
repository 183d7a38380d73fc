"""A clipping step of a 7B model with and without speculation: `python -m benchmarks.speculation [--json FILE]`.

All seconds are predictions, for the problems of `benchmarks/desktop.py`; nothing was run on such a card. "Gate": no
update starts before the last gradient. "Speculate": updates on the host may, with a log of the old values. These are
seconds of a step that clips nothing. "No gate" does not clip, and is a bound. "Endless": without the rate of the
host's memory, in fractions. The others keep to the rate of the hardware file, in fractions and in whole tensors. The
host has 512 GB; "short" has 128 GB.
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
from offmate.solver.solve import solve

from offmate.machines.hardware import load

from .desktop import BATCHES, CARDS, GB, gated, problem_of
from .overhead import machine
from .tables import show

_SHORT_BYTES = 128 * GB


def main() -> None:
    """Plan every row, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cards", nargs="*", default=[card for card, _ in CARDS])
    parser.add_argument("--fractions", action="store_true", help="leave whole tensors out, which take minutes")
    arguments = parser.parse_args()
    rows = list(_rows(arguments.cards, arguments.fractions))
    show("A step of Llama-2-7B that clips nothing, predicted", rows, ".2f")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def _rows(cards: list[str], fractions: bool) -> Iterator[dict[str, Any]]:
    for card, budget_bytes in CARDS:
        for batch, sequence in BATCHES if card in cards else ():
            free = problem_of(load(card), batch, sequence, budget_bytes)
            behind = gated(free, update_steps(free.groups, free.device_budget_bytes))
            for name, problem in (("no gate", free), ("gate", behind), ("speculate", speculating(behind))):
                case = {"card": card, "tokens": f"{batch} x {sequence}", "updates": name}
                row = case | _solved(problem) | ({} if fractions else _planned(problem))
                print(row, flush=True)
                yield row


def _solved(problem: Problem) -> dict[str, Any]:
    endless = replace(problem, rates=problem.rates.with_endless_host_memory)
    short = replace(problem, host_budget_bytes=_SHORT_BYTES)
    return {
        "endless s": solve(endless).objective_s,
        "program s": solve(problem).objective_s,
        "short s": solve(short).objective_s,
    }


def _planned(problem: Problem) -> dict[str, Any]:
    planned = plan(problem)
    assert planned.simulation is not None and planned.schedule is not None
    early = (a for a in planned.schedule.actions if a.kind is Kind.SPECULATE_CPU)
    logs = sum(planned.schedule.item_bytes[items.log(a.name)] for a in early)
    return {"simulated s": planned.simulation.step_s, "log GB": logs / GB}


if __name__ == "__main__":
    main()
