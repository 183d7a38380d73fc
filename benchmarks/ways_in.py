"""The cost of each way into offmate: a step with host gradients, a planned optimizer, clipping and accumulation.

`python -m benchmarks.ways_in [--steps N] [--share S] [--json FILE]` trains copies of the demo model on the emulated
device, at an ample budget and at a share of plain PyTorch's peak, and compares every way with plain PyTorch doing the
same, in alternating steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import offmate
from offmate.cli.demo import Batch, demo_batches, demo_model, demo_optimizer, reference_peak_bytes
from offmate.sizes import format_bytes

from .overhead import machine

WARM_UP_STEPS = 2
MAX_NORM = 1.0


@dataclass(frozen=True)
class Way:
    """One way to train.

    Parameters
    ----------
    planned: whether the plan updates; otherwise gradients arrive on the host. clips: whether their norm is clipped.
    micro_batches: forwards and backwards per update.
    """

    name: str
    planned: bool
    clips: bool = False
    micro_batches: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `offmate.compile` besides the optimizer."""
        return {"max_grad_norm": MAX_NORM if self.clips else None, "accumulation_steps": self.micro_batches}


WAYS = (
    Way("planned optimizer", planned=True),
    Way("planned, clipped", planned=True, clips=True),
    Way("planned, 4 micro-batches", planned=True, micro_batches=4),
    Way("planned, clipped, 4 micro-batches", planned=True, clips=True, micro_batches=4),
    Way("host gradients", planned=False),
    Way("host gradients, clipped", planned=False, clips=True),
    Way("host gradients, 4 micro-batches", planned=False, micro_batches=4),
)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ways_in", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="measured steps of each (default: 8)")
    parser.add_argument(
        "--share", type=float, default=0.25, metavar="S", help="budget as a share of the peak (default: 0.25)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number to FILE")
    arguments = parser.parse_args()
    if arguments.steps < 1 or not 0 < arguments.share < 1:
        parser.error("--steps must be at least 1, --share between 0 and 1")
    peak_bytes = reference_peak_bytes("emulated")
    budgets = {"ample": 2 * peak_bytes, f"{arguments.share:.0%}": int(arguments.share * peak_bytes)}
    cases = [(name, budget, way) for name, budget in budgets.items() for way in WAYS]
    rows = [
        {"way": way.name, "budget": name, "budget_bytes": budget, **measure(way, budget, arguments.steps)}
        for name, budget, way in track(cases, "measuring", console=Console(stderr=True), transient=True)
    ]
    result = {"machine": machine(), "reference_peak_bytes": peak_bytes, "rows": rows}
    _show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(way: Way, budget_bytes: int, n_steps: int) -> dict[str, Any]:
    """Measure seconds per update of plain PyTorch and offmate in turn; medians, peaks, and whether losses agree."""
    batches = demo_batches((WARM_UP_STEPS + n_steps) * way.micro_batches)
    updates = [batches[i : i + way.micro_batches] for i in range(0, len(batches), way.micro_batches)]
    reference = demo_model()
    plainly = _step(reference, demo_optimizer(reference), way, clips=way.clips)
    ours = demo_model()
    optimizer = demo_optimizer(ours)
    given = {"optimizer": optimizer, **way.settings} if way.planned else {}
    ours = offmate.compile(ours, budget_bytes, device="emulated", **given)
    planned = _step(ours, optimizer, way, clips=way.clips and not way.planned)
    seconds: dict[str, list[float]] = {"plain": [], "offmate": []}
    losses: dict[str, list[float]] = {"plain": [], "offmate": []}
    for index, update in enumerate(updates):
        both: list[tuple[str, Callable[[list[Batch]], float]]] = [("plain", plainly), ("offmate", planned)]
        for name, step in both if index % 2 else reversed(both):
            start_s = time.perf_counter()
            losses[name].append(step(update))
            if name == "offmate":
                # Updates may continue into the next forward; here they must not continue into the other's step.
                ours.offmate.sync()
            seconds[name].append(time.perf_counter() - start_s)
    kept = {name: taken[WARM_UP_STEPS:] for name, taken in seconds.items()}
    return {
        "step_s": statistics.median(kept["offmate"]),
        "reference_step_s": statistics.median(kept["plain"]),
        "pair_ratio": statistics.median(a / b for a, b in zip(kept["offmate"], kept["plain"])),
        "predicted_step_s": ours.offmate.plan.predicted_step_s,
        "peak_bytes": ours.offmate.peak_bytes,
        "host_bytes": ours.offmate.plan.host_bytes,
        "identical": losses["offmate"] == losses["plain"],
        "steps_s": kept["offmate"],
        "reference_steps_s": kept["plain"],
    }


def _step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, way: Way, clips: bool
) -> Callable[[list[Batch]], float]:
    def step(update: list[Batch]) -> float:
        total = 0.0
        for batch in update:
            loss = model(**batch).loss / way.micro_batches
            loss.backward()
            total += loss.item()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _show(result: dict[str, Any]) -> None:
    where = result["machine"]
    peak = format_bytes(result["reference_peak_bytes"])
    table = Table(title=f"{where['cpu']}, {where['cores']} cores; plain PyTorch's peak {peak}")
    for header in ("way", "budget", "s per update", "plain PyTorch", "ratio, pair by pair", "predicted", "losses"):
        table.add_column(header, justify="left" if header in ("way", "losses") else "right")
    for row in result["rows"]:
        table.add_row(
            row["way"],
            f"{format_bytes(row['budget_bytes'])} ({row['budget']})",
            f"{row['step_s']:.3f}",
            f"{row['reference_step_s']:.3f}",
            f"{row['pair_ratio']:.2f}",
            f"{row['predicted_step_s']:.3f}",
            "identical" if row["identical"] else "DIFFERENT",
        )
    Console(highlight=False, width=120).print(table)


if __name__ == "__main__":
    main()
