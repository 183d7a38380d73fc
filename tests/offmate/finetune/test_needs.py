"""What a run needs, from the configuration alone, and the precision that follows from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from offmate.errors import ArgumentValueError
from offmate.finetune import needs
from offmate.finetune.needs import machine_of, model_without_weights, needs_of, resolved_precision
from offmate.finetune.settings import make_settings
from offmate.finetune.updates import UpdateRule
from offmate.finetune.weights import build_model, load_config, stored_dtype

from .finetune_kit import make_models

NAMED = {"model": "m", "data": "d", "output": "o"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.mark.parametrize(
    ("stored", "lora", "precision"),
    [
        (torch.float32, None, "fp32"),
        (torch.float32, 4, "fp32"),
        (torch.bfloat16, None, "bf16-master"),
        (torch.bfloat16, 4, "bf16"),
        (torch.float16, None, "bf16-master"),
        (torch.float16, 4, "bf16"),
    ],
)
def test_the_precision_follows_the_checkpoint(stored, lora, precision):
    assert resolved_precision(make_settings({**NAMED, "lora": lora}), stored).precision == precision
    assert resolved_precision(make_settings({**NAMED, "precision": "fp32"}), stored).precision == "fp32"


def test_the_dtype_is_that_of_the_weights_else_of_the_configuration(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base / "llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    known = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**known, "dtype": "float32"}))
    assert stored_dtype(tmp_path, load_config(tmp_path)) == torch.bfloat16
    (tmp_path / "model.safetensors").unlink()
    assert stored_dtype(tmp_path, load_config(tmp_path)) == torch.float32
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert stored_dtype(tmp_path, load_config(tmp_path)) == torch.float32
    header = json.dumps({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ArgumentValueError, match="the weights are quantised"):
        stored_dtype(tmp_path, load_config(tmp_path))


@pytest.mark.parametrize(
    "more", [{"precision": "fp32"}, {"precision": "bf16-master"}, {"precision": "bf16", "lora": 4}]
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_without_weights_is_the_model(base, name, more):
    settings = make_settings({**NAMED, **more})
    bare, real = model_without_weights(settings, base / name), build_model(settings, base / name, None)
    own = {n: (p.shape, p.dtype, p.requires_grad) for n, p in bare.named_parameters()}
    assert own == {n: (p.shape, p.dtype, p.requires_grad) for n, p in real.named_parameters()}
    assert all(p.is_meta for p in bare.parameters())
    found = [needs_of(settings, model, UpdateRule(model, settings), "emulated") for model in (bare, real)]
    assert found[0] == found[1]
    assert found[0].weights_bytes == sum(p.numel() * p.element_size() for p in real.parameters())


def test_a_seventy_billion_shape_is_known_in_no_time_and_no_memory(tmp_path):
    LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, dtype="bfloat16",
    ).save_pretrained(tmp_path)  # fmt: skip
    settings = make_settings({**NAMED, "precision": "bf16", "lora": 16})
    bare = model_without_weights(settings, tmp_path)
    found = needs_of(settings, bare, UpdateRule(bare, settings), "emulated")
    assert found.n_params - found.n_trained == 70_553_706_496
    assert found.weights_bytes == 2 * 70_553_706_496 + 4 * found.n_trained
    assert found.largest_bytes == 128256 * 8192 * 2


@pytest.mark.parametrize(
    ("card", "rates", "doubts"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090", False),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx3060", True),
        ("NVIDIA H100 80GB HBM3", "h100", False),
        ("Some Card", "rtx3060", True),
    ],
)
def test_a_card_is_forecast_with_its_own_rates_or_says_whose(monkeypatch, card, rates, doubts):
    monkeypatch.setattr(needs, "accelerator", lambda kind: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(needs, "words", lambda device: card)
    name, doubt = machine_of("cuda:0")
    assert name == rates and bool(doubt) == doubts and (card in doubt) == doubts
