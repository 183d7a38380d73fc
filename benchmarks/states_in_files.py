"""Optimizer states in files: seconds, peaks and bits of training with a quarter of the states' bytes as RAM.

`python -m benchmarks.states_in_files --dir DIR [--steps 4] [--json FILE]` trains all parameters of a Llama of random
weights (63 M in bfloat16, with float32 copies, so that states have 12 bytes per parameter) with AdamW on the emulated
device, each time in a process of its own: with plain PyTorch, with plenty of RAM, and with a quarter of the states'
bytes as RAM and two storage paths in DIR, which are held to 600 and 200 MB/s by the engine. With 65 % of them, a
model of wider and fewer layers (75 M) trains twice: with paths for states alone ("more RAM"), and with paths that take
parameters, too ("cast"), so that those whose float32 copies are in RAM need not be there. The table has the seconds
per step beside the predicted ones, what a step reads and writes, the peak of the process's own memory, measured from
outside, beside what the plan counts, and whether losses, parameters and states are plain PyTorch's, bit for bit. What
PyTorch, planning and their libraries take beside tensors is measured with a model of as many layers and hardly any
parameters. It is counted to what is planned.
"""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.throttle import Throttle
from offmate.solver.items import parameter
from offmate.solver.schedule import Schedule
from rich.console import Console
from rich.table import Table

import offmate
from offmate.session import state_storage

from .overhead import machine
from .own_processes import in_a_process, memory_now, read_arguments, start_to_measure, stop_to_measure

_TOKENS = 32
RATES = {"fast": 600e6, "slow": 200e6}  # bytes per second of each path, of reads and writes in turns


def main() -> None:
    """Train in each way, print the table, write it if asked."""
    arguments = read_arguments(__doc__, _WAYS, steps=4)
    if arguments.way:
        print(json.dumps(trained(arguments.dir, _WAYS[arguments.way], arguments.steps)))
        return
    rows = {way: in_a_process("states_in_files", arguments, way) for way in _WAYS}
    libraries_bytes = rows.pop("libraries")["own_bytes"]
    table = Table("way", "s per step", "predicted", "read and written, MiB", "own memory, MiB", "planned", "bits")
    for way, row in rows.items():
        plain = rows["plain, wide" if _WAYS[way].width == WIDE["width"] else "plain"]
        if not way.startswith("plain"):
            row["libraries_bytes"] = libraries_bytes
            row["planned_bytes"] += libraries_bytes
        row["exact"] = (row["losses"], row["hash"]) == (plain["losses"], plain["hash"])
        predicted = f"{row['predicted_s']:.2f}" if row["predicted_s"] else "-"
        sizes = (f"{row[name] / 2**20:.0f}" for name in ("stored_bytes", "own_bytes", "planned_bytes"))
        table.add_row(way, f"{row['step_s']:.2f}", predicted, *sizes, "the same" if row["exact"] else "DIFFER")
    Console(width=110).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


WIDE = {"width": 1024, "layers": 4}
"""Hardly any transfer is of less than 4 MiB, so that their number does not matter."""


@dataclass(frozen=True)
class Way:
    """A way to train the model.

    Parameters
    ----------
    width, layers: of the model. ram: bytes of RAM for tensors, in those of the states; None trains with plain PyTorch.
    paths: names of the storage paths. amsgrad: whether AdamW has a third state. gpu_bytes: the device's budget.
    parameters: whether parameters may lie on the paths, too.
    """

    ram: float | None
    paths: tuple[str, ...] = ()
    width: int = 512
    layers: int = 14
    amsgrad: bool = False
    gpu_bytes: int = 300 << 20
    parameters: bool = False


_WAYS = {
    "libraries": Way(8.0, width=8),
    "plain": Way(None),
    "plenty": Way(8.0),
    "files": Way(0.25, tuple(RATES)),
    "plain, wide": Way(None, **WIDE),
    "more RAM": Way(0.65, tuple(RATES), gpu_bytes=200 << 20, **WIDE),
    "cast": Way(0.65, tuple(RATES), gpu_bytes=200 << 20, parameters=True, **WIDE),
}


def trained(folder: Path, way: Way, steps: int) -> dict[str, Any]:
    """Train in this process; return seconds, bytes, losses and a hash of parameters and states."""
    from transformers import LlamaConfig, LlamaForCausalLM

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    width = way.width
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=way.layers,
        num_attention_heads=min(8, width // 4), vocab_size=4000, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16).train()
    optimizer = offmate.with_master_weights(torch.optim.AdamW)(
        model.parameters(), lr=1e-4, fused=True, amsgrad=way.amsgrad
    )
    params_bytes = sum(param.nbytes for param in model.parameters())
    states_bytes = 6 * params_bytes
    before = memory_now()
    if way.ram is not None:
        offmate.compile(
            model, way.gpu_bytes, optimizer=optimizer, device="emulated", config=offmate.Config(cache_dir=None),
            cpu_budget=int(way.ram * states_bytes), storage=paths(folder, way.paths, way.parameters) or None,
        )  # fmt: skip
    losses, seconds = [], list[float]()
    for step in range(steps + 2):
        tokens = torch.randint(0, 4000, (1, _TOKENS), generator=torch.Generator().manual_seed(step))
        if step == 2:  # planning is over, every state exists, and memory has settled
            start_to_measure()
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    stop_to_measure()
    plan = model.offmate.plan if way.ram is not None else None
    return {
        "params_bytes": params_bytes,
        "states_bytes": states_bytes,
        "step_s": statistics.median(seconds[2:]),
        "predicted_s": plan.predicted_step_s if plan is not None else None,
        "stored_bytes": sum(plan.stored_bytes) if plan is not None else 0,
        "cast_bytes": cast_bytes(plan.schedule) if plan is not None else 0,
        "planned_bytes": plan.host_bytes + plan.budget_bytes - params_bytes if plan is not None else 0,
        "losses": losses,
        "hash": _hash(model, optimizer),
        **before,
    }


def cast_bytes(schedule: Schedule) -> int:
    """Return the bytes of the parameters that a schedule casts from their float32 copies."""
    return sum(schedule.item_bytes[parameter(name)] for name in schedule.cast_parameters)


def paths(folder: Path, names: Sequence[str], parameters: bool = False) -> list[offmate.StoragePath]:
    """Return paths of known rates, to which the engine is held."""
    throttles = [Throttle(RATES[name], RATES[name]) for name in names]
    state_storage.Engine = functools.partial(Engine, throttles=throttles)  # type: ignore[misc, assignment]
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
    return [offmate.StoragePath(folder / name, RATES[name], RATES[name], parameters=parameters) for name in names]


def _hash(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    states = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values(), *(states[n][key] for n in sorted(states) for key in sorted(states[n]))]
    for tensor in tensors:
        found.update(torch.as_tensor(tensor).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
