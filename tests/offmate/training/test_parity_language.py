"""Hugging Face models train inside a budget with plain PyTorch's numbers, whatever the padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...pairs import covering
from ..parity import BUDGETS, HALF, LEAST, Batch, Case, check

transformers = pytest.importorskip("transformers")

VOCABULARY = 64
MASKS = ("no_mask", "ones", "padding")

TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", TINY),
    "gpt2": ("GPT2", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "mixtral": ("Mixtral", TINY | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", TINY),
    "qwen3": ("Qwen3", TINY | {"head_dim": 8}),
    "phi": ("Phi", TINY),
    "gemma2": ("Gemma2", TINY | {"head_dim": 8, "sliding_window": 64}),
    "bloom": ("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
}


def language_model(name: str) -> torch.nn.Module:
    prefix, settings = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**settings, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    found = getattr(transformers, f"{prefix}LMHeadModel", None) or getattr(transformers, f"{prefix}ForCausalLM")
    return found(config)


def text_batches(mask: str = "no_mask", length: int = 256) -> list[Batch]:
    """Two batches of two texts."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for shortened in (40, 100):
        ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if mask != "no_mask":
            batch["attention_mask"] = torch.ones_like(ids)
        if mask == "padding":
            batch["attention_mask"][1, length - shortened :] = 0
            batch["labels"][1, length - shortened :] = -100
        batches.append(batch)
    return batches


def text_case(name: str, mask: str = "no_mask", variant: str = "", **more: Any) -> Case:
    return Case(f"{name}-{mask}{variant}", lambda: language_model(name), lambda: text_batches(mask), **more)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "mask", "budget"), covering(["llama", "gpt2", "mixtral"], MASKS, BUDGETS))
def test_matrix(name: str, mask: str, budget: str, cache_dir: str) -> None:
    check(text_case(name, mask), budget, cache_dir)


@pytest.mark.parametrize(
    ("name", "mask", "budget"),
    [
        ("qwen2", "no_mask", LEAST),
        ("qwen3", "padding", LEAST),
        ("phi", "padding", HALF),
        ("gemma2", "ones", LEAST),
        ("bloom", "padding", HALF),
    ],
)
def test_other_architectures(name: str, mask: str, budget: str, cache_dir: str) -> None:
    check(text_case(name, mask), budget, cache_dir)
