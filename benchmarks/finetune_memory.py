"""The memory of `offmate finetune` with a base that is larger than its RAM, seen from outside.

`python -m benchmarks.finetune_memory --dir DIR [--steps 4] [--json FILE]` writes a Llama of random weights (1 GiB in
bfloat16, and the same in float32) and a text into DIR, and trains a LoRA adapter on it with the emulated device: with
plenty of RAM, with a third of the base's bytes as RAM, and twice with that from the float32 checkpoint and a folder for
what is converted. Each command is watched from outside. The table has the peak of the process's own memory (RssAnon
and RssShmem) up to the first step and from then on, that of file pages in it, and whether the losses are those with
plenty of RAM, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .overhead import machine

_GPU_BUDGET = "360MiB"
_SAMPLES_S = 0.02
_KINDS = ("RssAnon", "RssShmem", "RssFile")


def main() -> None:
    """Train in each way, print the table, write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = arguments.dir / "finetune-memory"
    if not folder.exists():
        _write(folder)
    base_bytes = (folder / "bf16" / "model.safetensors").stat().st_size
    shutil.rmtree(folder / "drive", ignore_errors=True)
    (folder / "drive").mkdir()
    short = ("--cpu-budget", str(base_bytes // 3))
    drive = ("--storage", str(folder / "drive"), "--precision", "bf16")
    ways: dict[str, tuple[str, tuple[str, ...]]] = {
        "plenty of RAM": ("bf16", ("--cpu-budget", str(8 * base_bytes))),
        "a third": ("bf16", short),
        "a third, from fp32, first": ("fp32", (*short, *drive)),
        "a third, from fp32, again": ("fp32", (*short, *drive)),
    }
    rows = {way: _trained(folder, model, options, arguments.steps) for way, (model, options) in ways.items()}
    table = Table("way", "own, before, MiB", "own, training, MiB", "file pages, MiB", "s per step", "losses")
    for way, row in rows.items():
        row["exact"] = row["losses"] == rows["plenty of RAM"]["losses"]
        sizes = (f"{row[name] / 2**20:.0f}" for name in ("own_before", "own_training", "file_pages"))
        table.add_row(way, *sizes, f"{row['step_s']:.2f}", "the same" if row["exact"] else "DIFFER")
    console = Console(width=120)
    console.print(f"base: {base_bytes / 2**20:.0f} MiB, RAM in a third: {base_bytes / 3 / 2**20:.0f} MiB")
    console.print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def _write(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.offmate.finetune.finetune_kit import TEXT, VOCABULARY, make_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1792, intermediate_size=7168, num_hidden_layers=10, num_attention_heads=14, vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        model.to(dtype).save_pretrained(folder / name, max_shard_size="100GB")
        make_tokenizer().save_pretrained(folder / name)
    (folder / "text.txt").write_text(TEXT[:20_000])


def _trained(folder: Path, model: str, options: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Run the command, watch its memory, and return peaks, seconds and losses."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    command = [
        sys.executable, "-m", "offmate", "finetune", "--model", str(folder / model), "--data",
        str(folder / "text.txt"), "--output", str(folder / "out"), "--lora", "8", "--steps", str(steps), "--device",
        "emulated", "--gpu-budget", _GPU_BUDGET, "--sequence-length", "32", "--batch-size", "1", "--eval-fraction",
        "0.05", "--yes", "--json", *options,
    ]  # fmt: skip
    print(" ".join(command), file=sys.stderr)
    with (folder / "said.jsonl").open("w") as said:
        process = subprocess.Popen(command, stdout=said)
        before, training, files, times = 0, 0, 0, dict[int, float]()
        while process.poll() is None:
            own, pages = _memory(process.pid)
            done = sum('"event": "step"' in line for line in (folder / "said.jsonl").read_text().splitlines())
            times.setdefault(done, time.perf_counter())
            before, training = (max(before, own), training) if not done else (before, max(training, own))
            files = max(files, pages)
            time.sleep(_SAMPLES_S)
    lines = (folder / "said.jsonl").read_text().splitlines()
    if process.returncode:
        raise SystemExit("\n".join(lines))
    events = [json.loads(line) for line in lines]
    found = sorted(times.values())
    return {
        "own_before": before,
        "own_training": training,
        "file_pages": files,
        "step_s": (found[-1] - found[1]) / max(len(found) - 2, 1),
        "said": [
            line for event in events for line in event.get("lines", ()) if line.startswith(("base", "needs", "RAM"))
        ],
        "losses": [event["loss"] for event in events if event["event"] in ("step", "evaluation")],
    }


def _memory(process: int) -> tuple[int, int]:
    """Return a process's own bytes in memory, and those of files."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0, 0
    rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    anon, shared, files = (int(rows[name].split()[0]) << 10 if name in rows else 0 for name in _KINDS)
    return anon + shared, files


if __name__ == "__main__":
    main()
