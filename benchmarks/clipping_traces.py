"""Which steps clip: recorded here, made after published logs, and made against the rule.

`python -m benchmarks.clipping_traces --json FILE` trains a Llama architecture of 0.9 M parameters in plain PyTorch on
this repository's own texts, byte by byte, with gradients clipped to 1.0, and writes the norms of all steps: from
scratch on the documentation, and then on the sources, all parameters or an adapter of LoRA. It takes some minutes.
`python -m benchmarks.speculation --traces` reads them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .overhead import machine

NORMS = Path(__file__).parent / "results" / "clipping-norms.json"
MAX_NORM = 1.0
_ROOT = Path(__file__).parent.parent
_BATCH, _BYTES = 8, 128
_WARMUP = 0.03


def main() -> None:
    """Train every run, and write its norms."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=NORMS)
    arguments = parser.parse_args()
    runs = dict(_recorded())
    arguments.json.write_text(json.dumps({"machine": machine(), "max_norm": MAX_NORM, "norms": runs}) + "\n")


def recorded() -> dict[str, list[bool]]:
    """Return by run whether each of its steps clipped, from the norms that were recorded."""
    found = json.loads(NORMS.read_text())
    return {name: [norm > found["max_norm"] for norm in norms] for name, norms in found["norms"].items()}


def published() -> dict[str, list[bool]]:
    """Return traces made after published logs, with a seed; the logs give counts, and not which steps."""
    rng = random.Random(0)
    return {
        # SuperOffload, arXiv 2509.21271, section 5.7: "from iterations 1 to 1000, roll-backs occur frequently", for
        # which seven of ten stand here, and then "only 93 times between steps 1000 and 80000".
        "SuperOffload, 175B": _chance(rng, 1000, 0.7) + _chance(rng, 79_000, 93 / 79_000),
        # transformers issue 29659, LoRA of Gemma: nine of ten logged norms are 1.0 or more.
        "nine of ten": _chance(rng, 1000, 0.9),
        # modal-labs/llm-finetuning pull request 82: between 0.38 and 0.57 of an epoch, all logged norms are 1.8 to 15.
        "all": [True] * 1000,
        # transformers pull request 35438, Qwen2.5-7B: a mean norm of 0.45.
        "none": [False] * 1000,
    }


def against_the_rule() -> dict[str, list[bool]]:
    """Return traces on which a rule that looks at the last 64 steps may err."""
    periods = (16, 48, 64, 96)
    alternating = {f"{period} and {period}": [bool(n // period % 2) for n in range(2000)] for period in periods}
    rng = random.Random(1)
    by_chance = {f"{share:.0%} by chance": _chance(rng, 2000, share) for share in (0.2, 0.4)}
    return alternating | {"8 of every 100": [n % 100 < 8 for n in range(2000)]} | by_chance


def _chance(rng: random.Random, steps: int, share: float) -> list[bool]:
    return [rng.random() < share for _ in range(steps)]


def _recorded() -> Iterator[tuple[str, list[float]]]:
    torch.manual_seed(0)
    model = _model()
    documents, sources = (_bytes_of(pattern) for pattern in ("docs/*.md", "offmate/**/*.py"))
    yield "from scratch", _norms(model, documents, 800, 3e-3)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    yield "all parameters, 2e-5", _norms(model, sources, 600, 2e-5)
    model.load_state_dict(base)
    yield "all parameters, 1e-3", _norms(model, sources, 600, 1e-3)
    model.load_state_dict(base)
    yield "LoRA, 2e-4", _norms(_with_adapter(model), sources, 600, 2e-4)


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=_BYTES,
        )
    ).train()  # fmt: skip


def _with_adapter(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def _bytes_of(pattern: str) -> torch.Tensor:
    text = b"\n".join(path.read_bytes() for path in sorted(_ROOT.glob(pattern)))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _norms(model: Any, text: torch.Tensor, steps: int, rate: float) -> list[float]:
    """Train, and return the norm of all gradients at each step; the rate rises for 3 % of the steps, and falls to 0."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    warm = max(1, int(_WARMUP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / (steps - warm))
    )
    norms = []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - _BYTES, (_BATCH,))
        ids = torch.stack([text[start : start + _BYTES] for start in starts]).long()
        model(input_ids=ids, labels=ids).loss.backward()
        norms.append(round(torch.nn.utils.clip_grad_norm_(trained, MAX_NORM).item(), 4))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return norms


if __name__ == "__main__":
    main()
