"""Host updates: parameters per second of AdamW in float32, with float32 copies of bfloat16 parameters, and DeepSpeed's.

`python -m benchmarks.host_updates [--json FILE] [--elements 100000000] [--threads 2] [--rounds 7]` times one update of
one tensor by each way in turn, and shows medians. "copies" are updates of float32 copies as offmate makes them:
cast the gradient, update, cast the parameter, in chunks. "clipped" scales the gradient first, "whole" does the same
without chunks. DeepSpeed's `DeepSpeedCPUAdam` is timed where it is installed; it compiles its kernel on first use. With
float32 copies, ZeRO-Offload casts gradient and parameter around it, as is done here. Page faults are counted by the
operating system, per update.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import offmate
from offmate.optim.updater import Updater

from .overhead import machine
from .tables import show

_SCALE = 0.5


def main() -> None:
    """Time every way, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--elements", type=int, default=10**8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = measured(_ways(arguments.elements), arguments.elements, arguments.rounds)
    title = f"AdamW on the host, {arguments.elements:,} parameters, {arguments.threads} threads"
    show(title, rows, ".3g", width=120)
    if arguments.json:
        found = {"machine": machine(), "threads": arguments.threads, "elements": arguments.elements, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def measured(ways: dict[str, Callable[[], object]], elements: int, rounds: int) -> list[dict[str, Any]]:
    """Time all ways in turn, so that all see the same machine; the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    faults: dict[str, list[int]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, update in ways.items():
            before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            update()
            seconds[name].append(time.perf_counter() - start)
            faults[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    rates = {name: elements / statistics.median(times[1:]) for name, times in seconds.items()}
    first = next(iter(rates.values()))
    return [
        {
            "way": name,
            "million parameters/s": rate / 1e6,
            "of float32": rate / first,
            "page faults": int(statistics.median(faults[name][1:])),
        }
        for name, rate in rates.items()
    ]


def _ways(elements: int) -> dict[str, Callable[[], object]]:
    """Return an update by each way, on memory of its own that it has updated once."""
    ways = {"float32": _ours(torch.optim.AdamW, elements, torch.float32)}
    masters = offmate.with_master_weights(torch.optim.AdamW)
    ways["copies"] = _ours(masters, elements, torch.bfloat16)
    ways["copies, clipped"] = _ours(masters, elements, torch.bfloat16, clipped=True)
    ways["copies, whole"] = _whole(elements)
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return ways
    ways["DeepSpeed, float32"] = _deepspeed(DeepSpeedCPUAdam, elements, low=False)
    ways["DeepSpeed, copies"] = _deepspeed(DeepSpeedCPUAdam, elements, low=True)
    return ways


def _ours(kind: Any, elements: int, dtype: torch.dtype, *, clipped: bool = False) -> Callable[[], object]:
    param = torch.nn.Parameter(torch.randn(elements).to(dtype))
    grad, state, scale = torch.randn(elements).to(dtype), {}, torch.tensor(_SCALE)
    updater = Updater(kind([param], lr=1e-3, fused=True), {param: "weight"})

    def update() -> None:
        updater("weight", param.data, grad, state, scale if clipped else None)

    return update


def _whole(elements: int) -> Callable[[], object]:
    param, grad = (torch.randn(elements).to(torch.bfloat16) for _ in range(2))
    master = torch.nn.Parameter(param.float())
    step = torch.optim.AdamW([master], lr=1e-3, fused=True).step

    def update() -> None:
        master.grad = grad.float()
        step()
        param.copy_(master.detach())

    return update


def _deepspeed(kind: Any, elements: int, *, low: bool) -> Callable[[], object]:
    master = torch.nn.Parameter(torch.randn(elements))
    master.grad = torch.randn(elements)
    given, param = (torch.randn(elements).to(torch.bfloat16) if low else None for _ in range(2))
    step = kind([master], lr=1e-3, adamw_mode=True).step

    def update() -> None:
        if given is not None and master.grad is not None:
            master.grad.copy_(given)
        step()
        if param is not None:
            param.copy_(master.detach())

    return update


if __name__ == "__main__":
    main()
