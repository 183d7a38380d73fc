"""The cost of whole tensors: the simulated schedule compared with the integer program, over random problems.

`python -m benchmarks.rounding [--problems 20] [--json FILE]` plans random problems of two families: published
architectures on the machines whose files come with offmate, at random precisions, batches and budgets; and Llama-like
chains of random shapes on random machines, many of them unrealistic. Each family is planned with updates as gradients
come, behind a gate, and with four micro-batches per update. The first table has the ratio of simulated seconds to the
program's: for all problems, and for those in which no tensor's state takes more than a tenth of an iteration on the
link. The second table is an ablation: Algorithm 1 by itself, and then with the passes of the ladder added one by one.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver.instances.synthetic import Precision, Shape, Speeds, llama
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, Rates, update_steps
from offmate.solver.refinements import LADDER
from offmate.solver.solve import least_budget, solve
from rich.console import Console
from rich.table import Table

from offmate.machines import hardware

KINDS = {"as gradients come": 0, "behind a gate": 1, "four micro-batches": 4}
SMALL = 0.1  # most of an iteration that the copy of the largest state takes
MACHINES = ("a100-40", "h100", "h200", "rtx3060", "rtx3090", "rtx4090")
PRECISIONS = (Precision(), Precision(2, 2, 12, 2))  # float32; bfloat16 with float32 master weights
# Layers, hidden, intermediate, vocabulary, width of keys, gated, tied: from the models' own configuration files.
MODELS: dict[str, tuple[int, int, int, int, int, bool, bool]] = {
    "bloom-3b": (30, 2560, 10240, 250880, 2560, False, True),
    "gemma-2b": (18, 2048, 16384, 256000, 256, True, True),
    "gpt2": (12, 768, 3072, 50257, 768, False, True),
    "gpt2-medium": (24, 1024, 4096, 50257, 1024, False, True),
    "llama2-7b": (32, 4096, 11008, 32000, 4096, True, False),
    "llama3-8b": (32, 4096, 14336, 128256, 1024, True, False),
    "llama3.2-1b": (16, 2048, 8192, 128256, 512, True, True),
    "llama3.2-3b": (28, 3072, 8192, 128256, 1024, True, True),
    "mistral-7b": (32, 4096, 14336, 32000, 1024, True, False),
    "opt-1.3b": (24, 2048, 8192, 50272, 2048, False, True),
    "phi-3.8b": (32, 3072, 8192, 32064, 3072, True, False),
    "qwen2.5-1.5b": (28, 1536, 8960, 151936, 256, True, True),
    "tinyllama-1.1b": (22, 2048, 5632, 32000, 256, True, False),
}


def main() -> None:
    """Plan, print the table, write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=20, help="random problems of each family and kind")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console, rows, measured = Console(width=140), [], []
    for family, draw in (("published", published), ("made-up", made_up)):
        for kind, batches in KINDS.items():
            found = [_measured(family, kind, seed, *draw(seed, batches)) for seed in range(arguments.problems)]
            measured += found
            rows += list(_rows(f"{family}, {kind}", found))
            console.print(*rows[-2].values(), sep="  ")
        rows += list(_rows(f"{family}, all", [one for one in measured if one["family"] == family]))
    table = Table(*rows[0], title="Simulated seconds, in those of the program")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
    steps = ablation(measured)
    by_pass = Table(*steps[0], title="The ladder: every pass added to those above it")
    for row in steps:
        by_pass.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(by_pass)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "ablation": steps, "problems": measured}, indent=1) + "\n")


def published(seed: int, micro_batches: int) -> tuple[str, Problem]:
    """Return the name and the problem of a published architecture on a machine that exists."""
    rng = random.Random(seed)
    name, machine = rng.choice(sorted(MODELS)), hardware.load(rng.choice(MACHINES))
    *widths, kv_hidden, gated, tied = MODELS[name]
    batch, sequence = rng.choice([1, 2, 4, 8]), rng.choice([512, 1024, 2048, 4096])
    shape = Shape(*widths, batch, sequence, kv_hidden=kv_hidden, gated=gated, tied=tied)
    precision = rng.choice(PRECISIONS)
    part = precision.param_bytes / 4  # updates are given in bytes of float32 parameters
    speeds = Speeds(
        machine.flops_per_s("float32" if part == 1 else "bfloat16"),
        machine.memory_bytes_per_s,
        machine.cpu_update_bytes_per_s * part,
        machine.device_update_bytes_per_s * part,
        Rates(machine.in_bytes_per_s, machine.out_bytes_per_s, machine.both_bytes_per_s, machine.manage_s),
    )
    label = f"{name} {machine.name} {8 * precision.param_bytes} bit {batch} x {sequence}"
    return label, _budgeted(rng, llama(shape, speeds, 10**13, 10**14, precision=precision), micro_batches)


def made_up(seed: int, micro_batches: int) -> tuple[str, Problem]:
    """Return the name and the problem of a chain whose widths, rates and speeds are unrelated."""
    rng = random.Random(seed)
    hidden, link = rng.choice([512, 1024, 2048, 4096]), rng.choice([4e9, 1.2e10, 2.5e10])
    shape = Shape(
        rng.randint(4, 10),
        hidden,
        int(hidden * rng.choice([2.7, 3.5, 4])),
        rng.choice([8000, 32000, 128000]),
        rng.choice([1, 2, 4]),
        rng.choice([256, 512, 1024, 2048]),
        kv_hidden=hidden // rng.choice([1, 4]),
        gated=rng.random() < 0.7,
        tied=rng.random() < 0.3,
    )
    rates = Rates(link, link * rng.choice([0.8, 1]), link * rng.choice([1.2, 1.6, 2]), rng.choice([0, 5e-4, 1e-3]))
    host, device = rng.choice([5e8, 1e9, 3e9]), rng.choice([2e10, 5e10])
    speeds = Speeds(rng.choice([5e12, 2e13, 6e13]), rng.choice([3e11, 9e11]), host, device, rates)
    problem = llama(shape, speeds, 10**13, 10**14, precision=rng.choice(PRECISIONS))
    return f"{shape.layers} layers, {hidden} wide", _budgeted(rng, problem, micro_batches)


def _budgeted(rng: random.Random, problem: Problem, micro_batches: int) -> Problem:
    """Return the problem with a budget between the least and an ample one; without a gate if `micro_batches` is 0."""
    if micro_batches:
        adds = {g.name: (g.cpu_update_s / 4, g.device_update_s / 4) for g in problem.groups}
        groups = tuple(replace(g, cpu_add_s=adds[g.name][0], device_add_s=adds[g.name][1]) for g in problem.groups)
        problem = replace(problem, groups=groups, gate=True, gate_s=1e-3, micro_batches=micro_batches)
    least, ample = least_budget(problem).bytes, max(solve(problem).memory_bytes)
    budget_bytes = int(least * 1.02 + rng.random() * max(0, ample - least))
    steps = update_steps(problem.groups, budget_bytes) if micro_batches else problem.turn_around_steps
    return replace(problem, device_budget_bytes=budget_bytes, turn_around_steps=steps)


def _measured(family: str, kind: str, seed: int, label: str, problem: Problem) -> dict[str, Any]:
    """Measure simulated seconds over the program's, and the part of an iteration for the largest state's copy."""
    started = time.perf_counter()
    planned = plan(problem)
    took_s = time.perf_counter() - started
    assert planned.simulation is not None, planned.solution.status.value
    largest = max(t.state_bytes for group in problem.groups for t in group.tensors)
    copy_s = largest / min(problem.rates.in_bytes_per_s, problem.rates.out_bytes_per_s)
    seconds = planned.solution.objective_s
    return {
        "family": family,
        "kind": kind,
        "seed": seed,
        "problem": label,
        "budget bytes": problem.device_budget_bytes,
        "program s": seconds,
        "simulated s": planned.simulation.step_s,
        "ratio": planned.simulation.step_s / seconds,
        "largest copy": copy_s / seconds,
        "planning s": took_s,
        "passes": {gain.name: [1 + gain.after_s / seconds, gain.took_s] for gain in planned.gains},
    }


def ablation(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for Algorithm 1 and for every pass: the ratios after it, and the seconds that it took.

    Whether a pass runs depends only on the results before it, so the results after it are those of a ladder that ends
    there.
    """
    rows, ratios = [], [1.0] * len(measured)
    for name in ("algorithm 1", *(one.name for one in LADDER)):
        ran = [one["passes"][name] for one in measured if name in one["passes"]]
        ratios = [one["passes"].get(name, [before])[0] for one, before in zip(measured, ratios)]
        ordered = sorted(ratios)
        rows.append({
            "pass": name,
            "run on": len(ran),
            "within 5 %": sum(ratio <= 1.05 for ratio in ratios),
            "90 %": ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)],
            "worst": ordered[-1],
            "seconds": sum(took_s for _, took_s in ran),
        })  # fmt: skip
    return rows


def _rows(label: str, found: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    yield _row(label, [one["ratio"] for one in found])
    yield _row(f"{label}, small tensors", [one["ratio"] for one in found if one["largest copy"] <= SMALL])


def _row(kind: str, ratios: list[float]) -> dict[str, Any]:
    ordered = sorted(ratios)
    parts = {"median": 0.5, "80 %": 0.8, "95 %": 0.95, "worst": 1.0}
    found = {
        name: ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else ""
        for name, part in parts.items()
    }
    within = f"{sum(ratio <= 1.05 for ratio in ordered) / max(len(ordered), 1):.0%}"
    return {"kind": kind, "problems": len(ordered), **found, "within 5 %": within}


if __name__ == "__main__":
    main()
