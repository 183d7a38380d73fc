"""Steps behind a gate before and after the update phase had as many steps as it needs, measured on the emulated device.

`python -m benchmarks.gate [--steps N] [--slower N] [--budget SHARE] [--json FILE]` trains two copies of a small Llama
that clip by the norm of all gradients, with steps of the two in turn. "Before": three turn-around steps, so that the
device makes all its updates in one of them and no gradient leaves to wait. "After": the default. The link and the
host's updates are an RTX 3090's, so many times slower: a copy, or an update, waits until it has taken its time. This
takes no core, so that other work on the machine disturbs little. Both plans rest on the same seconds and know those
rates, and that copies and host updates run beside the computes. A measured step ends with its last update. A predicted
one is shorter, since updates may continue into the next forward.

The second table compares the seconds in which the program is solved, for Llama-2-7B on an RTX 3090
(`benchmarks/desktop.py`), in turn as well.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from offmate.runtime.devices.emulated import EmulatedDevice
from offmate.solver.plan import plan as plan_problem
from offmate.solver.problem import update_steps
from offmate.solver.resources import Resource
from offmate.solver.solve import solve
from rich.console import Console
from rich.table import Table

import offmate
from offmate.machines import devices
from offmate.machines.hardware import load
from offmate.optim.updater import Updater

from .desktop import GB, gated, problem_of
from .overhead import machine

CARD = "rtx3090"
WARM_UP_STEPS = 3
TOKENS, LAYERS, HIDDEN, VOCAB = 32, 8, 512, 256
BEFORE_STEPS = 3
_TRAINING_BYTES = 16  # per parameter in single precision: itself, its gradient and its two moments
_LEARNING_RATE, _MAX_NORM = 1e-4, 1.0
CONFIGS = {"before": BEFORE_STEPS, "after": None}


def main() -> None:
    """Measure, print both tables, and write them if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="measured steps of each (default: 20)")
    parser.add_argument("--slower", type=float, default=20.0, metavar="N", help="than an RTX 3090 (default: 20)")
    parser.add_argument("--budget", type=float, default=0.2, metavar="SHARE", help="of all training bytes (0.2)")
    parser.add_argument("--solves", type=int, default=5, metavar="N", help="solves of each (default: 5)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {"machine": machine(), "steps": measured(arguments.steps, arguments.slower, arguments.budget)}
    found |= {"solves": solved(arguments.solves), "load_1min_after": machine()["load_1min"]}
    _print(
        f"Steps in turn, link and host {arguments.slower:g} times slower than an RTX 3090's: seconds", found["steps"]
    )
    _print("Solving 32 layers behind a gate: seconds", found["solves"])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def _print(title: str, found: dict[str, Any]) -> None:
    table = Table("", *found["before"], title=title)
    for name in CONFIGS:
        values = (statistics.median(v) if isinstance(v, list) else v for v in found[name].values())
        table.add_row(name, *(f"{value:.3f}" if isinstance(value, float) else str(value) for value in values))
    console = Console(width=160, highlight=False)
    console.print(table)
    console.print(", ".join(f"{name} {value:.3f}" for name, value in found["after / before"].items()))


def measured(n_steps: int, slower: float, budget: float) -> dict[str, Any]:
    """Measure steps in turn.

    Parameters
    ----------
    n_steps: measured steps of each, after WARM_UP_STEPS that are not. budget: share of all training bytes.

    Returns: for each its steps' seconds, the predicted ones, the turn-around steps, and the tensors that the host
    updates; the ratios of the medians, of the medians pair by pair, and of the predictions; whether losses are equal.
    """
    batch = {"input_ids": torch.arange(TOKENS)[None] % VOCAB}
    batch["labels"] = batch["input_ids"].clone()
    with slowed(slower) as host_bytes_per_s:
        plans = _plans(batch, budget, host_bytes_per_s)
        trained = {name: _compiled(plan, CONFIGS[name]) for name, plan in plans.items()}
        seconds, losses = _alternate(trained, batch, WARM_UP_STEPS + n_steps)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    pairs = [after / before for before, after in zip(seconds["before"], seconds["after"])]
    rows = {
        name: {
            "turn-around steps": plan.problem.turn_around_steps,
            "tensors on the host": len(plan.schedule.update_cpu_s),
            "predicted": plan.predicted_step_s,
            "measured, median": seconds[name],
            "fastest": min(seconds[name]),
        }
        for name, plan in plans.items()
    }
    ratios = {
        "median": medians["after"] / medians["before"],
        "pair by pair": statistics.median(pairs),
        "fastest": min(seconds["after"]) / min(seconds["before"]),
        "predicted": plans["after"].predicted_step_s / plans["before"].predicted_step_s,
    }
    return rows | {"after / before": ratios, "identical losses": losses["before"] == losses["after"]}


@contextmanager
def slowed(slower: float) -> Iterator[float]:
    """Inside, copies and host updates take their time; yields the host's rate in bytes of parameters per second."""
    card = load(CARD)
    host_bytes_per_s = card.cpu_update_bytes_per_s / slower
    link = {Resource.IN: card.in_bytes_per_s / slower, Resource.OUT: card.out_bytes_per_s / slower}
    step_one = Updater.step_one

    def waiting(self: Updater, hyper: Any, param: torch.Tensor, *rest: Any, **options: Any) -> None:
        due = time.perf_counter() + param.nbytes / host_bytes_per_s
        step_one(self, hyper, param, *rest, **options)
        if threading.current_thread() is not threading.main_thread():  # the host's, not the device's
            time.sleep(max(0.0, due - time.perf_counter()))

    device = functools.partial(EmulatedDevice, link_bytes_per_s=link)
    with mock.patch.object(devices, "EmulatedDevice", device), mock.patch.object(Updater, "step_one", waiting):
        yield host_bytes_per_s


def model_of_training() -> tuple[Any, torch.optim.Optimizer]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=11 * HIDDEN // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    return model, torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)


def _arguments(turn_around_steps: int | None) -> dict[str, Any]:
    config = offmate.Config(cache_dir=None, turn_around_steps=turn_around_steps)
    return {"device": "emulated", "max_grad_norm": _MAX_NORM, "config": config}


def _plans(batch: dict[str, torch.Tensor], budget: float, host_bytes_per_s: float) -> dict[str, Any]:
    """Plan both from the seconds that were measured for the second one, and the host's rate."""
    plans = {}
    for name, steps in CONFIGS.items():
        model, optimizer = model_of_training()
        size = int(budget * _TRAINING_BYTES * sum(param.numel() for param in model.parameters()))
        plans[name] = offmate.plan(model, size, optimizer=optimizer, example_inputs=batch, **_arguments(steps))
    known = plans["after"].problem
    rates = replace(known.rates, shared_cores=False)
    groups = tuple(replace(group, cpu_update_s=group.param_bytes / host_bytes_per_s) for group in known.groups)
    for name, plan in plans.items():
        problem = replace(plan.problem, blocks=known.blocks, groups=groups, rates=rates, gate_s=known.gate_s)
        schedule = plan_problem(problem).schedule
        assert schedule is not None
        plans[name] = replace(plan, problem=problem, schedule=schedule)
    return plans


def _compiled(plan: Any, turn_around_steps: int | None) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = model_of_training()
    arguments = _arguments(turn_around_steps)
    return offmate.compile(model, plan.budget_bytes, optimizer=optimizer, plan=plan, **arguments), optimizer


def _alternate(trained: dict[str, Any], batch: dict[str, torch.Tensor], n_steps: int) -> tuple[Any, Any]:
    """Run a step of each in turn; return seconds after the warm-up, and all losses."""
    seconds: dict[str, list[float]] = {name: [] for name in trained}
    losses: dict[str, list[float]] = {name: [] for name in trained}
    for index in range(n_steps):
        for name in sorted(trained, reverse=index % 2 == 1):
            model, optimizer = trained[name]
            start_s = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.offmate.sync()  # what continues into the next forward must not continue into the other's step
            seconds[name].append(time.perf_counter() - start_s)
            losses[name].append(loss.item())
    return {name: times[WARM_UP_STEPS:] for name, times in seconds.items()}, losses


def solved(n_solves: int) -> dict[str, Any]:
    """Return the seconds of each solve, and of the program's step, before and after."""
    budget_bytes = 22 * GB
    problem = problem_of(load(CARD), 4, 512, budget_bytes)
    steps = {"before": BEFORE_STEPS, "after": update_steps(problem.groups, budget_bytes)}
    rows: dict[str, Any] = {name: {"turn-around steps": n, "program": 0.0, "solve": []} for name, n in steps.items()}
    for _ in range(n_solves):
        for name, n in steps.items():
            solution = solve(gated(problem, n))
            rows[name]["program"] = solution.objective_s
            rows[name]["solve"].append(solution.solve_s)
    medians = {name: statistics.median(row["solve"]) for name, row in rows.items()}
    return rows | {"after / before": {"solve": medians["after"] / medians["before"]}}


if __name__ == "__main__":
    main()
