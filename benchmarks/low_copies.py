"""A step of a 7B model in float32 under autocast: `python -m benchmarks.low_copies [--json FILE]`.

All seconds are predictions for synthetic chains of half-layer blocks (Llama-2-7B, 4 x 512 tokens, products in bf16) and
the rates of the hardware files; nothing was run on such a card. "float32": weights and gradients cross the link in four
bytes. "all": every weight has a copy in bf16 that the host casts, and gradients leave in two bytes. "some": only the
weights that the faster of these two plans updates on the host. offmate takes the fastest. What autocast's casts cost on
the device is left out of all three.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver.instances.synthetic import Precision
from offmate.solver.plan import Planned, plan
from offmate.solver.problem import Problem, update_steps

from offmate.machines.hardware import load

from .desktop import GB, MASTERS, gated, problem_of
from .overhead import machine
from .tables import show

FLOAT32 = Precision(param_bytes=4, grad_bytes=4, state_bytes=8, activation_bytes=2)
CARDS = (
    ("rtx3060", 11 * GB), ("rtx3090", 22 * GB), ("rtx4090", 22 * GB), ("rtx5090", 30 * GB), ("a100-40", 36 * GB),
    ("h100", 72 * GB),
)  # fmt: skip


def main() -> None:
    """Plan every row, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = list(_rows())
    show("A step of Llama-2-7B in float32 under autocast, predicted", rows, ".3f")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def _rows() -> Iterator[dict[str, Any]]:
    for card, budget_bytes in CARDS:
        for clipped in (False, True):
            problems = [_problem(card, budget_bytes, precision, clipped) for precision in (FLOAT32, MASTERS)]
            plans = [plan(problem) for problem in problems]
            faster = min(plans, key=_seconds)
            some = plan(_mixed(*problems, faster))
            seconds = {word: _seconds(found) for word, found in zip(("float32", "all", "some"), (*plans, some))}
            best = min(seconds.values())
            yield {"card": card, "clipped": clipped} | seconds | {"best / float32": best / seconds["float32"]}


def _problem(card: str, budget_bytes: int, precision: Precision, clipped: bool) -> Problem:
    problem = problem_of(load(card), 4, 512, budget_bytes, precision=precision)
    return gated(problem, update_steps(problem.groups, budget_bytes)) if clipped else problem


def _mixed(whole: Problem, low: Problem, faster: Planned) -> Problem:
    """Return the problem with copies of the groups that a plan updates mostly on the host, with the larger peaks."""
    assert faster.solution is not None
    hosted = {name for name, flow in faster.solution.groups.items() if flow.cpu_part > 1 / 2}
    groups = tuple(two if two.name in hosted else one for one, two in zip(whole.groups, low.groups))
    steps = max(whole.turn_around_steps, low.turn_around_steps)
    return replace(whole, groups=groups, rates=low.rates, turn_around_steps=steps)


def _seconds(found: Planned) -> float:
    assert found.simulation is not None
    return found.simulation.step_s


if __name__ == "__main__":
    main()
