"""A step of a 7B model on desktop cards, with and without a gate: `python -m benchmarks.desktop [--json FILE]`.

All seconds are predictions for synthetic chains of half-layer blocks (Llama-2-7B, bf16 with fp32 masters but for one
row) and the rates of the hardware files; nothing was run on such a card. A gate (clipping, accumulation) lets no update
start before the last gradient. "One step": three turn-around steps, so that the device makes all its updates in one of
them. "As needed": as many as the update phase needs (`update_steps`). Each is planned without a limit of host memory
and with that of the hardware file; "under it" is the first schedule's time with the limit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver.instances.synthetic import Precision, Shape, Speeds, llama
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, Rates, update_steps
from offmate.solver.simulate import simulate

from offmate.machines.hardware import Hardware, load

from .overhead import machine
from .tables import show

GB = 10**9
MASTERS = Precision(param_bytes=2, grad_bytes=2, state_bytes=12, activation_bytes=2)
# Machine, its budget, and the host's memory, which is ample here.
CARDS = (("rtx3060", 11 * GB), ("rtx3090", 22 * GB), ("rtx4090", 22 * GB))
BATCHES = ((4, 512), (8, 1024))
FP32 = Precision()
MORE = (("rtx3090", 22 * GB, FP32, (4, 512)), ("h100", 72 * GB, MASTERS, (8, 1024)))  # without a gate
_HOST_BYTES = 512 * GB
_MANAGE_S = 1e-3
_UPDATE_BYTES, _FP32_UPDATE_BYTES = 30, 28  # of host memory that an update of a parameter moves: with a master, alone
_NORM_SHARE = 1 / 7  # of an update's bytes, those that taking a gradient's norm reads
_VERDICT_S = 1e-4


def main() -> None:
    """Plan every row, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = list(_rows())
    show("A step of Llama-2-7B, predicted", rows, ".2f")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def _rows() -> Iterator[dict[str, Any]]:
    for card, budget_bytes in CARDS:
        for batch, sequence in BATCHES:
            problem = problem_of(load(card), batch, sequence, budget_bytes)
            needed = update_steps(problem.groups, budget_bytes)
            for gate, steps in (("none", 3), ("one step", 3), ("as needed", needed)):
                case = {"card": card, "tokens": f"{batch} x {sequence}", "gate": gate, "turn-around steps": steps}
                yield case | _planned(problem if gate == "none" else gated(problem, steps))
    for card, budget_bytes, precision, (batch, sequence) in MORE:
        problem = problem_of(load(card), batch, sequence, budget_bytes, precision=precision)
        words = f"{batch} x {sequence}{', fp32' if precision == FP32 else ''}"
        yield {"card": card, "tokens": words, "gate": "none", "turn-around steps": 3} | _planned(problem)


def problem_of(
    hardware: Hardware,
    batch: int,
    sequence: int,
    budget_bytes: int,
    layers: int = 32,
    hidden: int = 4096,
    *,
    whole_layers: bool = False,
    precision: Precision = MASTERS,
) -> Problem:
    """Return the problem of a machine, as the program sees it without a gate.

    Parameters
    ----------
    layers, hidden: of the model, whose other widths are in Llama's proportions. whole_layers: one block per layer.
    precision: bf16 with fp32 masters, or fp32; with activations of two bytes, products are in bf16.
    """
    masters = precision == MASTERS
    cpu_s, device_s = hardware.update_s(1, masters=masters)
    rates = Rates(
        hardware.in_bytes_per_s,
        hardware.out_bytes_per_s,
        hardware.both_bytes_per_s,
        max(hardware.manage_s, _MANAGE_S),
        host_memory_bytes_per_s=hardware.host_memory_bytes_per_s,
        worker_bytes_per_s=(_UPDATE_BYTES if masters else _FP32_UPDATE_BYTES) / cpu_s,
    )
    speeds = Speeds(
        hardware.flops_per_s("bfloat16" if precision.activation_bytes == 2 else "float32"),
        hardware.memory_bytes_per_s,
        precision.param_bytes / cpu_s,
        precision.param_bytes / device_s,
        rates,
    )
    intermediate = 11008 * hidden // 4096 // 256 * 256
    shape = Shape(layers, hidden, intermediate, vocab=32000, batch=batch, sequence=sequence)
    return llama(shape, speeds, budget_bytes, _HOST_BYTES, precision=precision, whole_layers=whole_layers)


def gated(problem: Problem, steps: int) -> Problem:
    """Return the problem behind a gate that clips; backwards take the norms of the gradients that they complete."""
    groups = (replace(group, norm_s=_NORM_SHARE * group.device_update_s) for group in problem.groups)
    return replace(problem, groups=tuple(groups), gate=True, gate_s=_VERDICT_S, turn_around_steps=steps)


def _planned(problem: Problem) -> dict[str, Any]:
    endless = plan(replace(problem, rates=problem.rates.with_endless_host_memory))
    start = time.perf_counter()
    limited = plan(problem)
    planned_s = time.perf_counter() - start
    assert endless.schedule is not None and endless.simulation is not None and limited.simulation is not None
    return {
        "compute s": sum(min(o.forward_s + o.backward_s for o in block.options) for block in problem.blocks),
        "endless: program s": endless.solution.objective_s,
        "simulated s": endless.simulation.step_s,
        "under it s": simulate(replace(endless.schedule, rates=problem.rates)).step_s,
        "limited: program s": limited.solution.objective_s,
        "its own simulated s": limited.simulation.step_s,
        "of the program": limited.simulation.step_s / limited.solution.objective_s,
        "solved in s": limited.solution.solve_s,
        "planned in s": planned_s,
    }


if __name__ == "__main__":
    main()
