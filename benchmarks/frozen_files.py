"""A frozen base in its checkpoint's files: seconds and memory of training with less RAM than the base has.

`python -m benchmarks.frozen_files --dir DIR [--steps 6] [--json FILE]` writes a Llama of random weights (0.8 GiB in
bfloat16) into DIR, and trains a LoRA adapter on it with the emulated device, each time in a process of its own: with
plain PyTorch, with plenty of RAM, and with a third of the base's bytes as RAM. The table has the seconds per step
beside the predicted ones, what a step reads from files, the peaks of the process's own memory and of file pages in it,
and whether the losses are plain PyTorch's, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import offmate

from .overhead import machine

_GPU_BUDGET_BYTES = 220 << 20
_WAYS = ("plain", "plenty", "files")
_TOKENS = 48
_SAMPLES_S = 0.02


def main() -> None:
    """Train in each way, print the table, write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=_WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    checkpoint = arguments.dir / "frozen-files"
    if arguments.way:
        print(json.dumps(_trained(checkpoint, arguments.way, arguments.steps)))
        return
    if not checkpoint.exists():
        _write(checkpoint)
    rows = {way: in_a_process("frozen_files", arguments, way) for way in _WAYS}
    table = Table("way", "s per step", "predicted", "read, MiB", "own memory, MiB", "file pages, MiB", "losses")
    for way, row in rows.items():
        row["exact"] = row["losses"] == rows["plain"]["losses"]
        sizes = (f"{row[name] / 2**20:.0f}" for name in ("read_bytes", "own_bytes", "file_bytes"))
        predicted = f"{row['predicted_s']:.2f}" if row["predicted_s"] else "-"
        table.add_row(way, f"{row['step_s']:.2f}", predicted, *sizes, "the same" if row["exact"] else "DIFFER")
    Console(width=110).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def in_a_process(name: str, arguments: argparse.Namespace, way: str) -> dict[str, Any]:
    """Run a benchmark's way to train in a process of its own, and return the row that it prints."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--dir", str(arguments.dir), "--way", way]
    ran = subprocess.run([*command, "--steps", str(arguments.steps)], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def _write(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, vocab_size=8000,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _trained(folder: Path, way: str, steps: int) -> dict[str, Any]:
    """Train in this process; return seconds, bytes and losses."""
    import peft
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    before = memory()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.config.use_cache = False
    base_bytes = sum(param.nbytes for param in model.parameters())
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    if way != "plain":
        ram = base_bytes // 3 if way == "files" else 8 * base_bytes
        config = offmate.Config(cache_dir=None)
        offmate.compile(model, _GPU_BUDGET_BYTES, optimizer=optimizer, cpu_budget=ram, device="emulated", config=config)
    losses, seconds, peaks = [], [], Peaks()
    for step in range(steps + 1):
        tokens = torch.randint(0, 8000, (1, _TOKENS), generator=torch.Generator().manual_seed(step))
        if step == 1:  # planning is over, and memory has settled
            peaks.start()
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    own_bytes, file_bytes = peaks.stop()
    plan = model.offmate.plan if way != "plain" else None
    return {
        "base_bytes": base_bytes,
        "step_s": statistics.median(seconds[1:]),
        "predicted_s": plan.predicted_step_s if plan is not None else None,
        "read_bytes": plan.read_bytes if plan is not None else 0,
        "host_bytes": plan.host_bytes if plan is not None else 0,
        "own_bytes": own_bytes - before[0],
        "file_bytes": file_bytes - before[1],
        "losses": losses,
    }


class Peaks:
    """The peaks of a process's own memory and of file pages in it, by samples."""

    def __init__(self) -> None:
        self._most, self._ends = (0, 0), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> tuple[int, int]:
        self._ends.set()
        self._thread.join()
        return self._most

    def _sample(self) -> None:
        while not self._ends.wait(_SAMPLES_S):
            now = memory()
            self._most = max(self._most[0], now[0]), max(self._most[1], now[1])


def memory() -> tuple[int, int]:
    """Return the process's own bytes in memory, and those of files."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    own, files = (int(rows[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
    return own, files


if __name__ == "__main__":
    main()
