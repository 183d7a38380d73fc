"""The part of a budget that a plan can use before the allocator's fragmentation makes it fail.

`python -m benchmarks.placement [--models 7b 1b] [--budgets 8 10 16 24 40] [--json FILE]` plans models of real sizes for
a card that need not be present and places the plans on the simulated accelerator (`tests/accelerator`), whose allocator
follows the rules of CUDA's; its memory is never touched, so that 40 GB take none. No operator runs: the rehearsal of an
iteration counts the bytes reserved, and those of tensors that move so that others fit. `--train` also trains, with real
operators, a model as large as two cores can handle, and compares the predicted bytes with those reserved.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import offmate
from offmate.capture.fake import fake_batch, faked, stand_in
from offmate.cli import shapes
from offmate.machines.hardware import load
from offmate.optim.updater import Updater, parameter_names
from offmate.planning.placement import fitted, pockets
from offmate.planning.planner import make_plan
from offmate.planning.request import Prepared, Request
from tests import accelerator
from tests.accelerator import device as sim

from .gpu_cases import MODELS
from .overhead import machine

HARDWARE = "rtx4090"
ALLOCATOR = "simulated, with the rules of CUDA's; operators ran only in the rows marked as trained"
TRAINED_PERCENT = (150, 110)  # of the least budget
HOST_BYTES = 1 << 42
CARD_BYTES = 80 << 30
COLUMNS = ("model", "dtype", "budget GB", "tensors %", "reserved %", "moved GB", "margins tried", "refused")

Row = dict[str, Any]


def main() -> None:
    """Place every plan, print a table, and write the results."""
    arguments = _arguments()
    if accelerator.load() is None:
        raise SystemExit(accelerator.why_not())
    sim.set_poisons(False)
    sim.set_total_bytes(CARD_BYTES)
    console, found = Console(width=120), {"machine": machine(), "allocator": ALLOCATOR, "planned_for": HARDWARE}
    found |= {"rows": [], "trained": []}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            for dtype in arguments.dtypes:
                for budget in arguments.budgets:
                    row = place(name, dtype, int(budget * 1e9), offmate.Config(cache_dir=folder))
                    console.print(*(_shown(row[column]) for column in COLUMNS), sep="  ")
                    found["rows"].append(row)
                    _write(found, arguments.json)
    _show(console, found["rows"])
    for percent in TRAINED_PERCENT if arguments.train else ():
        found["trained"].append(trained(percent))
        console.print(found["trained"][-1])
        _write(found, arguments.json)


def _write(found: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def place(name: str, dtype: str, budget_bytes: int, config: offmate.Config) -> Row:
    """Place one plan; return its row of the table.

    Parameters
    ----------
    name: a name in `gpu_cases.MODELS`. dtype: that of parameters, gradients and states. config: one with the folder for
        plans.
    """
    case = MODELS[name]
    model = shapes.build(case.shape, dtype)
    batch = shapes.batch_for(model, case.samples, case.tokens)
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    updater = Updater(optimizer, parameter_names(model, optimizer))
    request = Request(budget_bytes, HOST_BYTES, HARDWARE, config)
    margins: list[int] = []

    def make(margin_bytes: int) -> Prepared:
        margins.append(margin_bytes)
        with faked(model) as mode:
            return make_plan(
                model, (), fake_batch(mode, batch), replace(request, margin_bytes=margin_bytes), updater,
                machine=load(HARDWARE), real=stand_in(((), batch)),
            )  # fmt: skip

    row = {"model": case.shape, "dtype": dtype, "budget GB": budget_bytes / 1e9}
    row |= dict.fromkeys(("tensors %", "reserved %", "moved GB"))
    where = torch.device("sim:0")
    sim.set_limit_bytes(budget_bytes)
    held = pockets(where, model, batch)
    try:
        prepared, placed = fitted(make, model, updater, where, budget_bytes)
    except offmate.InfeasibleBudget as error:
        return row | {"margins tried": len(margins), "refused": str(error)}
    finally:
        del held
    plan = prepared.plan
    tensors = plan.predicted_peak_bytes - plan.allocator_bytes
    shares = {
        "moved GB": placed.moved_bytes / 1e9,
        "tensors %": 100 * tensors / budget_bytes,
        "reserved %": 100 * plan.predicted_peak_bytes / budget_bytes,
    }
    return row | shares | {"margins tried": len(margins), "refused": ""}


def trained(percent: int) -> Row:
    """Train a model of 120 million parameters in this part of the least budget, and compare prediction and reservation.

    Parameters
    ----------
    percent: budget in percent of the least budget, as named by a plan for an ample one.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sim.reset()
    sim.set_poisons(False)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
        use_cache=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).train()
    ids = torch.randint(0, 8000, (2, 256))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    settings: dict[str, Any] = {"device": "sim", "cpu_budget": 8 << 30, "config": offmate.Config(cache_dir=None)}
    batch = {"input_ids": ids, "labels": ids}
    ample = offmate.plan(model, 8 << 30, example_inputs=batch, optimizer=optimizer, **settings)
    budget = ample.least_budget_bytes * percent // 100
    model = offmate.compile(model, budget, optimizer=optimizer, **settings)
    for _ in range(4):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plan, reserved = model.offmate.plan, sim.max_memory_reserved()
    model._offmate_session.residence.bring_home()
    model._offmate_session.device.close()
    found = {
        "budget_bytes": budget,
        "tensors_bytes": plan.predicted_peak_bytes - plan.allocator_bytes,
        "predicted_bytes": plan.predicted_peak_bytes,
        "reserved_bytes": reserved,
        "predicted_above_reserved_percent": 100 * (plan.predicted_peak_bytes / reserved - 1),
    }
    del model, optimizer
    gc.collect()
    return found


def _show(console: Console, rows: list[Row]) -> None:
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*(_shown(row[column]) for column in COLUMNS))
    console.print(table)


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["7b", "1b"])
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[8, 10, 16, 24, 40], metavar="GB")
    parser.add_argument("--train", action="store_true", help="also train a model, with real operators")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number to FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
