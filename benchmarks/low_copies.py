"""A step of a 7B model in float32 under autocast: `python -m benchmarks.low_copies [--json FILE] [--only CARD ...]`.

All seconds are predictions for synthetic chains of half-layer blocks (Llama-2-7B, 4 x 512 tokens, products in bf16) and
the rates of the hardware files; nothing was run on such a card. "float32": weights and gradients cross the link in four
bytes. "gradients": the latter do in two, as autocast makes them, which those of several micro-batches cannot. "all":
every weight has a copy in bf16, too, which the host casts. "some": only the weights that the faster plan so far updates
on the host. offmate takes the fastest. Where weights come in float32, the device casts them in the forward and again in
the backward, and gradients of four bytes in the backward. Of 8 micro-batches, each is a pass of its own.
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
from offmate.solver.problem import Group, Problem, update_steps

from offmate.machines.hardware import Hardware, load

from .desktop import GB, MASTERS, gated, problem_of
from .overhead import machine
from .tables import show

FLOAT32 = Precision(param_bytes=4, grad_bytes=4, state_bytes=8, activation_bytes=2)
GRADIENTS = replace(FLOAT32, grad_bytes=2)
CARDS = {
    "rtx3060": 11 * GB, "rtx3090": 22 * GB, "rtx4090": 22 * GB, "rtx5090": 30 * GB, "a100-40": 36 * GB, "h100": 72 * GB,
}  # fmt: skip
_WAYS = ("float32", "gradients", "all", "some")
_SEVERAL = 8  # micro-batches
_CAST_BYTES = 6  # of the device's memory, read and written per element
_ADD_SHARE = 3 / 7  # of an update's seconds: adding reads two tensors and writes one, AdamW reads four and writes three


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
        for clipped, micro_batches in ((False, 1), (True, 1), (True, _SEVERAL)):
            ways = _ways(card, clipped, micro_batches)
            plans = {word: plan(problem) for word, problem in ways.items()}
            first = plans["float32" if micro_batches > 1 else "gradients"]
            faster = min(first, plans["all"], key=_seconds)
            plans["some"] = plan(_mixed(ways["float32" if micro_batches > 1 else "gradients"], ways["all"], faster))
            seconds = {word: _seconds(plans[word]) if word in plans else None for word in _WAYS}
            best = min(_seconds(found) for found in (first, plans["all"], plans["some"]))
            case = {"card": card, "micro-batches": micro_batches, "clipped": clipped}
            yield case | seconds | {"best / float32": best / _seconds(plans["float32"])}


def _ways(card: str, clipped: bool, micro_batches: int) -> dict[str, Problem]:
    """Return the problem of a machine for each way in which weights and gradients may move."""
    hardware, several = load(card), micro_batches > 1
    copies = replace(MASTERS, grad_bytes=FLOAT32.grad_bytes) if several else MASTERS
    found = {"float32": _problem(hardware, card, FLOAT32, FLOAT32), "all": _problem(hardware, card, copies, MASTERS)}
    cast_s = _CAST_BYTES / hardware.memory_bytes_per_s
    found["float32"] = casting_at_every_use(found["float32"], cast_s, gradients=True)
    if not several:
        found["gradients"] = casting_at_every_use(_problem(hardware, card, GRADIENTS, FLOAT32), cast_s)
    if clipped or several:
        found = {word: gated(one, update_steps(one.groups, CARDS[card])) for word, one in found.items()}
    if not several:
        return found
    sums = found["float32"].groups
    return {word: _accumulating(one, sums, micro_batches) for word, one in found.items()}


def _problem(hardware: Hardware, card: str, precision: Precision, updated: Precision) -> Problem:
    """Return the problem of one micro-batch.

    Parameters
    ----------
    updated: the precision whose updates take as many seconds.
    """
    sizes, times = (problem_of(hardware, 4, 512, CARDS[card], precision=one) for one in (precision, updated))
    seconds = zip(sizes.groups, times.groups)
    groups = [replace(g, cpu_update_s=t.cpu_update_s, device_update_s=t.device_update_s) for g, t in seconds]
    moved, timed = (sum(group.host_update_bytes for group in one) for one in (groups, times.groups))
    rate = times.rates.worker_bytes_per_s * moved / timed
    return replace(sizes, groups=tuple(groups), rates=replace(times.rates, worker_bytes_per_s=rate))


def _accumulating(problem: Problem, sums: tuple[Group, ...], micro_batches: int) -> Problem:
    """Return the problem of several micro-batches, whose gradients are added up as those of the groups in `sums`."""
    groups = (
        replace(g, norm_s=0.0, cpu_add_s=_ADD_SHARE * s.cpu_update_s, device_add_s=_ADD_SHARE * s.device_update_s)
        for g, s in zip(problem.groups, sums)
    )
    return replace(problem, groups=tuple(groups), micro_batches=micro_batches)


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
