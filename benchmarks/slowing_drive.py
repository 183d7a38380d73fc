"""A drive that slows down while optimizer states lie on it: seconds of each step beside the bound of the drives' rates.

`python -m benchmarks.slowing_drive --dir DIR [--steps 24] [--json FILE]` trains all parameters of a model of linear
layers (13 M in float32) with AdamW on the emulated device, with a part of the states on two storage paths in DIR. The
engine holds both to the same rate. The second one drops to half of it at step 5 and recovers at step 15. The bound of a
step is the bytes that it reads and writes, divided by the sum of both rates at that time. The same steps run again in
the same process with shares that do not change.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import torch
from offmate.runtime.storage.balance import Balance
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.throttle import Throttle
from rich.console import Console
from rich.table import Table

import offmate
from offmate.session import state_storage

from .overhead import machine

_WIDTH, _LAYERS = 1024, 12
_GPU_BUDGET_BYTES, _CPU_BUDGET_BYTES = 40 << 20, 90 << 20
_RATE = 15e6  # bytes per second of each path, of reads and writes in turns
_REQUEST_BYTES = 1 << 18  # so that a small model has as many chunks as a large one has of the usual size
_FIRST_STEPS = 3  # in which states are made, and written for the first time
_DROPS, _RECOVERS = 5, 15


class _Dropping(Throttle):
    """A throttle whose rate can be changed."""

    def set_rate(self, bytes_per_s: float) -> None:
        with self._lock:
            self._bytes_per_s = {False: bytes_per_s, True: bytes_per_s}


def main() -> None:
    """Train with shares that follow the rates and with fixed ones, print the table, write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    follows, fixed = (_trained(arguments.dir, arguments.steps, follows) for follows in (True, False))
    table = Table(
        "step", "rates, MB/s", "bound, s", "shares follow, s", "times the bound", "share of the 2nd", "fixed, s"
    )
    for step, row in enumerate(follows["steps"]):
        rates = f"{_RATE / 1e6:.0f}, {row['rate'] / 1e6:.0f}"
        table.add_row(
            str(step), rates, f"{row['bound_s']:.2f}", f"{row['step_s']:.2f}", f"{row['step_s'] / row['bound_s']:.2f}",
            f"{row['share']:.0%}", f"{fixed['steps'][step]['step_s']:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)
    print("losses are the same" if follows["losses"] == fixed["losses"] else "losses DIFFER")
    if arguments.json is not None:
        found = {"machine": machine(), "follows": follows, "fixed": fixed}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def _trained(folder: Path, n_steps: int, follows: bool) -> dict[str, Any]:
    """Return what each step took, and the losses."""
    throttles = [_Dropping(_RATE, _RATE), _Dropping(_RATE, _RATE)]
    state_storage.Engine = functools.partial(Engine, throttles=throttles, request_bytes=_REQUEST_BYTES)  # type: ignore[misc, assignment]
    state_storage.Balance = Balance if follows else _Still  # type: ignore[misc, assignment]
    paths = [offmate.StoragePath(folder / name, _RATE, _RATE) for name in ("first", "second")]
    for path in paths:
        Path(path.folder).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    offmate.compile(
        model, _GPU_BUDGET_BYTES, optimizer=optimizer, device="emulated", config=offmate.Config(cache_dir=None),
        cpu_budget=_CPU_BUDGET_BYTES, storage=paths,
    )  # fmt: skip
    steps, losses = [], []
    for step in range(-_FIRST_STEPS, n_steps):
        rate = _RATE / 2 if _DROPS <= step < _RECOVERS else _RATE
        throttles[1].set_rate(rate)
        batch = torch.randn(16, _WIDTH, generator=torch.Generator().manual_seed(step + _FIRST_STEPS))
        began_s = time.perf_counter()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step_s = time.perf_counter() - began_s
        stored = [path.stored_bytes for path in model.offmate.storage]
        if step >= 0:
            bound_s = sum(model.offmate.plan.stored_bytes) / (_RATE + rate)
            steps.append({"step_s": step_s, "bound_s": bound_s, "rate": rate, "share": stored[1] / sum(stored)})
    model._offmate_session.storage.close()
    return {"steps": steps, "losses": losses}


class _Still(Balance):
    """Lets nothing move."""

    def iteration_done(self) -> None:
        self._engine.iteration_done()


if __name__ == "__main__":
    main()
