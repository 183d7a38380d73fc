"""The cost of offmate when nothing has to move: its step compared with plain PyTorch's, at an ample budget.

`python -m benchmarks.overhead [--steps N] [--backend inductor] [--json FILE]` trains two copies of the demo model in
one process, with steps of the two in turn, and compares the medians. `--guards` instead measures the time that a call
spends on checking whether the Python behind the graph has changed, for the demo model and one of 1,000 modules.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import offmate
from offmate.capture.checks import check_hooks
from offmate.cli.demo import (
    BATCH,
    TOKENS,
    Batch,
    demo_batches,
    demo_model,
    demo_optimizer,
    reference_peak_bytes,
    train_step,
)
from offmate.guards.surroundings import surroundings
from offmate.guards.watch import Watch
from offmate.sizes import format_bytes

WARM_UP_STEPS = 2
AMPLE_FACTOR = 2


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="measured steps of each (default: 20)")
    parser.add_argument(
        "--backend", choices=("eager", "inductor"), default="eager", help="what runs offmate's blocks (default: eager)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number to FILE")
    parser.add_argument("--guards", action="store_true", help="measure the time that a call spends on guards instead")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; at least 1 is needed")
    if arguments.guards:
        result = {"machine": machine(), "guards": measure_guards()}
        _show_guards(result["guards"])
    else:
        result = {"machine": machine(), **measure(arguments.steps, arguments.backend)}
        _show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that the numbers were measured with."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "load_1min": os.getloadavg()[0],
    }


def measure(n_steps: int, backend: str) -> dict[str, Any]:
    """Measure the seconds of alternating steps, in order, and the ratio of their medians.

    Parameters
    ----------
    n_steps: number of measured steps of each, after WARM_UP_STEPS unmeasured ones. backend: as in `offmate.Config`.

    Returns: `step_s`, `reference_step_s` (medians), `ratio` of these, `pair_ratio` (the median of the pairwise ratios,
    which other work on the machine disturbs less), all times, whether the losses are equal and their largest
    difference, budget and peaks in bytes, predicted seconds.
    """
    batches = demo_batches(WARM_UP_STEPS + n_steps)
    peak_bytes = reference_peak_bytes("emulated")
    budget_bytes = AMPLE_FACTOR * peak_bytes
    reference = demo_model()
    reference_optimizer = demo_optimizer(reference)
    ours = demo_model()
    optimizer = demo_optimizer(ours)
    plan = offmate.plan(ours, budget_bytes, optimizer=optimizer, device="emulated", example_inputs=batches[0])
    config = offmate.Config(backend=backend)  # type: ignore[arg-type]
    ours = offmate.compile(ours, budget_bytes, optimizer=optimizer, device="emulated", plan=plan, config=config)

    def our_step(batch: Batch) -> float:
        loss = train_step(ours, optimizer, batch)
        # Updates may continue into the next forward; here they must not continue into the other's step.
        ours.offmate.sync()
        return loss

    steps = {"offmate": our_step, "reference": lambda batch: train_step(reference, reference_optimizer, batch)}
    return _alternate(steps, batches) | {
        "backend": backend,
        "budget_bytes": budget_bytes,
        "peak_bytes": ours.offmate.peak_bytes,
        "reference_peak_bytes": peak_bytes,
        "predicted_step_s": plan.predicted_step_s,
    }


def _alternate(steps: dict[str, Callable[[Batch], float]], batches: list[Batch]) -> dict[str, Any]:
    """Run both on every batch in turn; return times after the warm-up, medians, and whether all losses agree."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for index, batch in enumerate(batches):
        # The first one alternates, so that neither always finds the caches as the other left them.
        for name in sorted(steps, reverse=index % 2 == 1):
            start_s = time.perf_counter()
            losses[name].append(steps[name](batch))
            seconds[name].append(time.perf_counter() - start_s)
    measured = {name: times[WARM_UP_STEPS:] for name, times in seconds.items()}
    step_s, reference_step_s = (statistics.median(measured[name]) for name in ("offmate", "reference"))
    return {
        "step_s": step_s,
        "reference_step_s": reference_step_s,
        "ratio": step_s / reference_step_s,
        "pair_ratio": statistics.median(a / b for a, b in zip(measured["offmate"], measured["reference"])),
        "steps_s": measured["offmate"],
        "reference_steps_s": measured["reference"],
        "identical": losses["offmate"] == losses["reference"],
        "loss_difference": max(abs(a - b) for a, b in zip(losses["offmate"], losses["reference"])),
    }


def _show(result: dict[str, Any]) -> None:
    where = result["machine"]
    table = Table(title=f"{where['cpu']}, {where['cores']} cores, {where['torch_threads']} threads, {where['torch']}")
    for header in ("", "median s per step", "fastest", "slowest", "device memory, peak"):
        table.add_column(header, justify="right" if header else "left")
    for name, prefix in (("plain PyTorch", "reference_"), ("offmate", "")):
        times = result[f"{prefix}steps_s"]
        table.add_row(
            name,
            f"{result[f'{prefix}step_s']:.3f}",
            f"{min(times):.3f}",
            f"{max(times):.3f}",
            format_bytes(result[f"{prefix}peak_bytes"]),
        )
    console = Console(highlight=False)
    console.print(table)
    losses = "identical" if result["identical"] else f"differ by up to {result['loss_difference']:.1e}"
    console.print(
        f"Ratio {result['ratio']:.3f}, pair by pair {result['pair_ratio']:.3f}, at {BATCH} × {TOKENS} tokens and a "
        f"budget of {format_bytes(result['budget_bytes'])}; losses {losses}."
    )


def measure_guards(repeats: int = 200) -> dict[str, dict[str, float]]:
    """Measure the seconds that one call spends on guards, for the demo model and for one of 1,000 modules.

    Returns: by model, its number of modules, the median, and the allowed seconds: 0.1 ms plus 2 µs per module.
    """
    parts = (torch.nn.Linear(2, 2), torch.nn.Dropout(0.1), torch.nn.ReLU())
    many = torch.nn.Sequential(*(copy.deepcopy(parts[i % 3]) for i in range(999)))
    found = {}
    for name, model in (("demo", demo_model()), ("1,000 modules", many)):
        watch = Watch(model)
        spent = []
        for _ in range(repeats):
            start = time.perf_counter()
            watch.look()
            surroundings()
            check_hooks(watch.parameters, planned=True)
            spent.append(time.perf_counter() - start)
        n_modules = len(list(model.modules()))
        allowed_s = 1e-4 + 2e-6 * n_modules
        found[name] = {"modules": n_modules, "median_s": statistics.median(spent), "allowed_s": allowed_s}
    return found


def _show_guards(found: dict[str, dict[str, float]]) -> None:
    table = Table(title="Time that a call spends on guards")
    for column in ("model", "modules", "median", "allowed"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, row in found.items():
        table.add_row(
            name, f"{row['modules']:,}", f"{1e3 * row['median_s']:.3f} ms", f"{1e3 * row['allowed_s']:.3f} ms"
        )
    Console().print(table)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
