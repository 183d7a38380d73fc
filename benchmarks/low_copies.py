"""A step of a 7B model in float32 under autocast: `python -m benchmarks.low_copies [--json FILE] [--only CARD ...]`.

All seconds are predictions for synthetic chains of half-layer blocks (Llama-2-7B, 4 x 512 tokens, products in bf16) and
the rates of the hardware files; nothing was run on such a card. "float32": weights and gradients cross the link in four
bytes. "gradients": the latter do in two, as autocast makes them. "all": every weight has a copy in bf16, too, which the
host casts. "some": only the weights that the faster of the last two plans updates on the host. offmate takes the
fastest of the last three. Where weights come in float32, the device casts them in the forward and again in the
backward, and the gradients of "float32" in the backward.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver.instances.casting import casting_at_every_use
from offmate.solver.instances.synthetic import Precision
from offmate.solver.plan import Planned, plan
from offmate.solver.problem import Problem, update_steps

from offmate.machines.hardware import load

from .desktop import GB, MASTERS, gated, problem_of
from .overhead import machine
from .tables import show

FLOAT32 = Precision(param_bytes=4, grad_bytes=4, state_bytes=8, activation_bytes=2)
GRADIENTS = replace(FLOAT32, grad_bytes=2)
CARDS = {
    "rtx3060": 11 * GB, "rtx3090": 22 * GB, "rtx4090": 22 * GB, "rtx5090": 30 * GB, "a100-40": 36 * GB, "h100": 72 * GB,
}  # fmt: skip
_CAST_BYTES = 6  # of the device's memory, read and written per element
_UPDATE_SHARE = 26 / 28  # of the bytes of RAM that an update moves with gradients of four bytes


def main() -> None:
    """Plan every row, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=CARDS, default=tuple(CARDS))
    arguments = parser.parse_args()
    rows = list(_rows(arguments.only))
    show("A step of Llama-2-7B in float32 under autocast, predicted", rows, ".3f")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def _rows(cards: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for card in cards:
        for clipped in (False, True):
            float32, alone, copies = (_problem(card, one, clipped) for one in (FLOAT32, GRADIENTS, MASTERS))
            cast_s = _CAST_BYTES / load(card).memory_bytes_per_s
            float32 = casting_at_every_use(float32, cast_s, gradients=True)
            alone = casting_at_every_use(alone, cast_s)
            plans = {"float32": plan(float32), "gradients": plan(alone), "all": plan(copies)}
            faster = min(plans["gradients"], plans["all"], key=_seconds)
            plans["some"] = plan(_mixed(alone, copies, faster))
            seconds = {word: _seconds(found) for word, found in plans.items()}
            best = min(seconds[word] for word in ("gradients", "all", "some"))
            yield {"card": card, "clipped": clipped} | seconds | {"best / float32": best / seconds["float32"]}


def _problem(card: str, precision: Precision, clipped: bool) -> Problem:
    budget_bytes = CARDS[card]
    problem = problem_of(load(card), 4, 512, budget_bytes, precision=precision)
    if precision == GRADIENTS:  # in the seconds of float32
        rate = _UPDATE_SHARE * problem.rates.worker_bytes_per_s
        problem = replace(problem, rates=replace(problem.rates, worker_bytes_per_s=rate))
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
