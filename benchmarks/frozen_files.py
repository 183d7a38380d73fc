"""A frozen base in its checkpoint's files: seconds and memory of training with less RAM than the base has.

`python -m benchmarks.frozen_files --dir DIR [--steps 6] [--json FILE]` writes a Llama of random weights (0.8 GiB in
bfloat16) into DIR, and trains a LoRA adapter on it with the emulated device, each time in a process of its own: with
plain PyTorch, with plenty of RAM, and with a third of the base's bytes as RAM. The table has the seconds per step
beside the predicted ones, what a step reads from files, the peaks of the process's own memory and of file pages in it,
measured from outside, and whether the losses are plain PyTorch's, bit for bit.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import offmate

from .overhead import machine
from .own_processes import in_a_process, memory_now, read_arguments, start_to_measure, stop_to_measure

_GPU_BUDGET_BYTES = 220 << 20
_WAYS = ("plain", "plenty", "files")
_TOKENS = 48


def main() -> None:
    """Train in each way, print the table, write it if asked."""
    arguments = read_arguments(__doc__, _WAYS, steps=6)
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
    before = memory_now()
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
    losses, seconds = [], list[float]()
    for step in range(steps + 1):
        tokens = torch.randint(0, 8000, (1, _TOKENS), generator=torch.Generator().manual_seed(step))
        if step == 1:  # planning is over, and memory has settled
            start_to_measure()
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    stop_to_measure()
    plan = model.offmate.plan if way != "plain" else None
    return {
        "base_bytes": base_bytes,
        "step_s": statistics.median(seconds[1:]),
        "predicted_s": plan.predicted_step_s if plan is not None else None,
        "read_bytes": plan.read_bytes if plan is not None else 0,
        "host_bytes": plan.host_bytes if plan is not None else 0,
        "losses": losses,
        **before,
    }


if __name__ == "__main__":
    main()
