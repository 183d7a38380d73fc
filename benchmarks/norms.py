"""What clipping computes, measured: the norms of all gradients and the verdict, as a share of a step.

`python -m benchmarks.norms [--steps N] [--budget SHARE] [--json FILE]` trains a small Llama that clips by the norm of
all gradients, on the emulated device: with one micro-batch per step, and with four, whose totals lie where the plan
puts them. "Norms" are the seconds of every norm of a gradient, in whichever thread it is taken, and of the sum over all
of them. "Verdict" is what the gate computes besides: the factor, and gradients on the device multiplied by it, which
plain PyTorch does for all gradients. Waiting for gradients that are under way is not counted, since the plan decides
how long that is. Seconds of all threads are added up as if none ran beside computes, so that shares are upper bounds.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from offmate.runtime.replay import gate
from offmate.runtime.replay.gradients import Gradients
from offmate.runtime.replay.norms import Norms

import offmate

from .overhead import machine
from .tables import show

WARM_UP = 2
MICRO_BATCHES = (1, 4)
TOKENS, LAYERS, HIDDEN, VOCAB, SEQUENCES = 512, 8, 768, 4096, 2
_MAX_NORM = 0.1  # clips in every step
_TRAINING_BYTES = 16  # per parameter in single precision: itself, its gradient and its two moments


class Spent:
    """Seconds of some calls in any thread, by name; calls within others count once, under the inner name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock, self._inner = threading.Lock(), threading.local()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, with its seconds less those of the timed calls within it added to a name."""

        @functools.wraps(call)
        def wrapper(*args: Any, **more: Any) -> Any:
            outer_s, self._inner.s = getattr(self._inner, "s", 0.0), 0.0
            start_s = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                took_s = time.perf_counter() - start_s
                with self._lock:
                    self.seconds[name] = self.seconds.get(name, 0.0) + took_s - self._inner.s
                self._inner.s = outer_s + took_s

        return wrapper


def main() -> None:
    """Measure, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="measured steps of each (default: 6)")
    parser.add_argument("--budget", type=float, default=0.3, metavar="SHARE", help="of all training bytes (0.3)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measured(n, arguments.steps, arguments.budget) for n in MICRO_BATCHES]
    show("Norms and verdict, in a step that clips", rows, digits=".4g")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def measured(micro_batches: int, n_steps: int, budget: float) -> dict[str, Any]:
    """Train some steps and return the medians of their seconds.

    Parameters
    ----------
    micro_batches: of a step. n_steps: measured, after WARM_UP that are not. budget: share of all training bytes.
    """
    model, optimizer = _model()
    n_params = sum(param.numel() for param in model.parameters())
    config = offmate.Config(cache_dir=None)
    compiled = offmate.compile(
        model, int(budget * _TRAINING_BYTES * n_params), optimizer=optimizer, device="emulated", config=config,
        max_grad_norm=_MAX_NORM, accumulation_steps=micro_batches,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(VOCAB, (SEQUENCES, TOKENS), generator=generator) for _ in range(micro_batches)]
    batches = [{"input_ids": one, "labels": one.clone()} for one in ids]
    with _timed() as spent:
        taken = [_step(compiled, optimizer, batches, spent) for _ in range(WARM_UP + n_steps)][WARM_UP:]
    step_s, norms_s, verdict_s = (statistics.median(one) for one in zip(*taken))
    return {
        "parameters": n_params,
        "tokens": SEQUENCES * TOKENS * micro_batches,
        "micro-batches": micro_batches,
        "step s": step_s,
        "norms s": norms_s,
        "verdict s": verdict_s,
        "norms and verdict / step": (norms_s + verdict_s) / step_s,
    }


def _model() -> tuple[Any, torch.optim.Optimizer]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 11 * HIDDEN // 4, "num_hidden_layers": LAYERS}
    sizes = {"vocab_size": VOCAB, "num_attention_heads": 12, "max_position_embeddings": TOKENS}
    model = LlamaForCausalLM(LlamaConfig(**shape, **sizes, use_cache=False)).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@contextmanager
def _timed() -> Iterator[Spent]:
    """Time norms, the sum over them, and what else the gate does; reading gradients may wait, and has its own name."""
    spent = Spent()
    with (
        mock.patch.object(Norms, "take", spent.timed("norms", Norms.take)),
        mock.patch.object(gate, "total_norm", spent.timed("norms", gate.total_norm)),
        mock.patch.object(gate.Gate, "open", spent.timed("verdict", gate.Gate.open)),
        mock.patch.object(Gradients, "whole", spent.timed("waiting", Gradients.whole)),
    ):
        yield spent


def _step(
    model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, torch.Tensor]], spent: Spent
) -> tuple[float, float, float]:
    """Return the seconds of a step, of its norms and of its verdict."""
    spent.seconds.clear()
    start_s = time.perf_counter()
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.offmate.sync()
    step_s = time.perf_counter() - start_s
    return step_s, spent.seconds["norms"], spent.seconds["verdict"]


if __name__ == "__main__":
    main()
