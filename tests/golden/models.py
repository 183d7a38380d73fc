"""Six captured models, planned for a machine that is not here: their plan files, as they were and as they are."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offmate

PROMPT = 128
VOCABULARY = 64
_TINY = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_LLAMA = _TINY | {"intermediate_size": 64, "num_key_value_heads": 2}
_MACHINE_BOUND = ("fingerprint", "plan_s", "about")  # versions, seconds and the day of the machine that planned


@dataclass(frozen=True)
class Case:
    """A model, one batch for it, and what `offmate.plan` is asked for.

    Parameters
    ----------
    part: of the way from the least budget to one that holds everything.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any] | tuple[Any, ...]]
    part: float
    hardware: str = "rtx3060"
    planned: bool = True
    asked: dict[str, Any] = field(default_factory=dict)


def _hub(prefix: str, head: str = "ForCausalLM", **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**settings, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    found: nn.Module = getattr(transformers, prefix + head)(config)
    return found


def _with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = _hub("Llama", **_LLAMA)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))  # type: ignore[arg-type]


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


def _text() -> dict[str, Any]:
    ids = torch.arange(2 * PROMPT).reshape(2, PROMPT) % VOCABULARY
    return {"input_ids": ids, "labels": ids.clone()}


def _masked_text() -> dict[str, Any]:
    batch = _text()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 100:] = 0
    return batch | {"attention_mask": mask}


CASES = {
    "llama, updates as gradients come": Case(lambda: _hub("Llama", **_LLAMA), _text, 0.1),
    "gpt2, tied and with dropout, behind a gate": Case(
        lambda: _hub("GPT2", "LMHeadModel", vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=256),
        _masked_text,
        0.2,
        asked={"max_grad_norm": 1.0},
    ),
    "mixtral, four micro-batches": Case(
        lambda: _hub("Mixtral", **_LLAMA, num_local_experts=4, num_experts_per_tok=2),
        _text,
        0.3,
        asked={"accumulation_steps": 4, "max_grad_norm": 1.0},
    ),
    "t5, encoder and decoder": Case(
        lambda: _hub(
            "T5",
            "ForConditionalGeneration",
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        _text,
        0.2,
        hardware="h100",
    ),
    "llama with adapters": Case(_with_adapters, _masked_text, 0.1, hardware="emulated"),
    "convolutions and a loop of its own": Case(
        _convolutions, lambda: (torch.zeros(4, 3, 24, 24),), 0.5, hardware="emulated", planned=False
    ),
}


def plan_file(name: str) -> dict[str, Any]:
    """What `Plan.save` writes of a case, but for what depends on the machine that planned."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    trained = [p for p in model.parameters() if p.requires_grad]
    asked: dict[str, Any] = {
        "example_inputs": case.batch(),
        "optimizer": torch.optim.AdamW(trained, lr=1e-3) if case.planned else None,
        "hardware": case.hardware,
        "cpu_budget": "1GiB",
        "config": offmate.Config(cache_dir=None),
        **case.asked,
    }
    ample = offmate.plan(model, "1GiB", **asked)
    budget = ample.least_budget_bytes + int(case.part * (ample.predicted_peak_bytes - ample.least_budget_bytes))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        offmate.plan(model, budget, **asked).save(path)
        data: dict[str, Any] = json.loads(path.read_text())
    for key in _MACHINE_BOUND:
        del data[key]
    return data
