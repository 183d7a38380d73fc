"""Micro-batches of an update block by block and one after the other, measured on the emulated device with a slow link.

`python -m benchmarks.by_block [--updates N] [--micro-batches N] [--shortest N] [--slower N] [--budget SHARE] [--json
FILE]` trains two copies of a small Llama, with updates of the two in turn. Parameters matter more than activations
there, and the device holds a part of them. With `--shortest`, the lengths of an update's micro-batches are spread
evenly, from the longest to that many tokens, as where a collator pads to the longest text of a batch. The link and the
host's updates are an RTX 3090's, so many times slower: a copy, or an update, waits until it has taken its time. Both
plans rest on the same seconds and know those rates, and that copies and host updates run beside the computes. Nothing
is clipped, so that the update of the one waits for no gate. A measured update ends when everything under way has ended,
which a predicted one need not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from offmate.solver.fat_steps import for_all, for_one
from offmate.solver.plan import plan as plan_problem

import offmate

from .gate import TOKENS, VOCAB, model_of_training, slowed
from .overhead import machine
from .tables import show

WARM_UP = 3
ORDERS = ("by batch", "by block")
_TRAINING_BYTES = 16  # per parameter in single precision: itself, its gradient and its two moments


def main() -> None:
    """Measure, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=8, metavar="N", help="measured updates of each (default: 8)")
    parser.add_argument("--micro-batches", type=int, default=8, metavar="N", help="of an update (default: 8)")
    parser.add_argument(
        "--shortest", type=int, default=TOKENS, metavar="N", help=f"tokens of a batch (default: {TOKENS})"
    )
    parser.add_argument("--slower", type=float, default=20.0, metavar="N", help="than an RTX 3090 (default: 20)")
    parser.add_argument("--budget", type=float, default=0.2, metavar="SHARE", help="of all training bytes (0.2)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not 2 <= arguments.shortest <= TOKENS:
        parser.error(f"--shortest is {arguments.shortest}; it must be at least 2 and at most {TOKENS}")
    lengths = _lengths(arguments.micro_batches, arguments.shortest)
    found = measured(arguments.updates, lengths, arguments.slower, arguments.budget)
    tokens = f"{lengths[0]} to {lengths[-1]}" if lengths[-1] < lengths[0] else f"{lengths[0]}"
    slower = f"link and host {arguments.slower:g} times slower than an RTX 3090's"
    title = f"{arguments.micro_batches} micro-batches of {tokens} tokens, {slower}"
    show(title, found["rows"])
    print(", ".join(f"{name} {value}" for name, value in found.items() if name != "rows"))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine()} | found, indent=1) + "\n")


def _lengths(micro_batches: int, shortest: int) -> list[int]:
    """Return lengths from TOKENS to the shortest one, spread evenly."""
    steps = max(1, micro_batches - 1)
    return [TOKENS - (TOKENS - shortest) * i // steps for i in range(micro_batches)]


def measured(n_updates: int, lengths: list[int], slower: float, budget: float) -> dict[str, Any]:
    """Measure updates in turn.

    Parameters
    ----------
    n_updates: measured updates of each, after WARM_UP that are not. lengths: tokens of each micro-batch, of which the
        first one has the most. budget: share of all training bytes.

    Returns: a row per order with predicted and measured seconds; the ratios of the medians and of the predictions;
    whether losses are equal.
    """
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(VOCAB, (1, tokens), generator=generator) for tokens in lengths]
    batches = [{"input_ids": one, "labels": one.clone()} for one in ids]
    with slowed(slower) as host_bytes_per_s:
        plans = _plans(batches[0], len(lengths), budget, host_bytes_per_s)
        trained = {order: _compiled(plan, order, len(lengths)) for order, plan in plans.items()}
        seconds, losses = _alternate(trained, batches, WARM_UP + n_updates)
    medians = {order: statistics.median(times) for order, times in seconds.items()}
    rows = [
        {
            "order": order,
            "predicted s": plan.predicted_step_s,
            "measured s, median": medians[order],
            "fastest": min(seconds[order]),
            "MB in": plan.moved_bytes[0] / 1e6,
            "device MB": plan.predicted_peak_bytes / 1e6,
        }
        for order, plan in plans.items()
    ]
    usual, blocks = (plans[order].predicted_step_s for order in ORDERS)
    return {
        "rows": rows,
        "by block / by batch": medians["by block"] / medians["by batch"],
        "predicted": blocks / usual,
        "identical losses": losses["by batch"] == losses["by block"],
    }


def _arguments(order: str, micro_batches: int) -> dict[str, Any]:
    config = offmate.Config(cache_dir=None, accumulation_order=order)  # type: ignore[arg-type]
    return {"device": "emulated", "accumulation_steps": micro_batches, "config": config}


def _plans(
    batch: dict[str, torch.Tensor], micro_batches: int, budget: float, host_bytes_per_s: float
) -> dict[str, Any]:
    """Plan both orders from the seconds that were measured for the first one, and the host's rate."""
    plans = {}
    for order in ORDERS:
        model, optimizer = model_of_training()
        size = int(budget * _TRAINING_BYTES * sum(param.numel() for param in model.parameters()))
        arguments = _arguments(order, micro_batches)
        plans[order] = offmate.plan(model, size, optimizer=optimizer, example_inputs=batch, **arguments)
    problems = {order: plan.problem for order, plan in plans.items() if plan.problem is not None}
    known = problems["by batch"]
    rates = replace(known.rates, shared_cores=False)
    for order, plan in plans.items():
        one = for_one(problems[order])
        groups = tuple(replace(group, cpu_update_s=group.param_bytes / host_bytes_per_s) for group in one.groups)
        slots = problems[order].per_step
        problem = for_all(replace(one, blocks=known.blocks, groups=groups, rates=rates), slots)
        schedule = plan_problem(problem).schedule
        assert schedule is not None
        plans[order] = replace(plan, problem=problem, schedule=schedule)
    return plans


def _compiled(plan: Any, order: str, micro_batches: int) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = model_of_training()
    arguments = _arguments(order, micro_batches)
    return offmate.compile(model, plan.budget_bytes, optimizer=optimizer, plan=plan, **arguments), optimizer


def _alternate(trained: dict[str, Any], batches: list[dict[str, torch.Tensor]], n_updates: int) -> tuple[Any, Any]:
    """Run an update of each in turn; return seconds after the warm-up, and all losses."""
    seconds: dict[str, list[float]] = {order: [] for order in trained}
    losses: dict[str, list[float]] = {order: [] for order in trained}
    for index in range(n_updates):
        for order in sorted(trained, reverse=index % 2 == 1):
            model, optimizer = trained[order]
            start_s = time.perf_counter()
            for batch in model.offmate.batches(batches):
                loss = model(**batch).loss / len(batches)
                loss.backward()
                losses[order].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            model.offmate.sync()  # what continues into the next forward must not continue into the other's update
            seconds[order].append(time.perf_counter() - start_s)
    return {order: times[WARM_UP:] for order, times in seconds.items()}, losses


if __name__ == "__main__":
    main()
