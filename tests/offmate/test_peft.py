"""Adapters of peft: the frozen base streams in, and nothing of it goes back."""

from __future__ import annotations

import pytest
import torch
from offmate.solver.schedule import Kind

import offmate

from .loops import CPU_BUDGET

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

BUDGET = 1 << 20


def base() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def adapted() -> torch.nn.Module:
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(base(), config).train()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (2, 16))
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_lora(tmp_path, cache_dir):
    runs = []
    for compiles in (True, False):
        model = adapted()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
        if compiles:
            offmate.compile(
                model, BUDGET, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET,
                config=offmate.Config(cache_dir=cache_dir),
            )  # fmt: skip
        runs.append((train(model, optimizer), model))
    (losses, ours), (expected, reference) = runs
    assert all(map(torch.equal, losses, expected))
    assert all(map(torch.equal, ours.parameters(), reference.parameters()))
    assert ours.offmate.peak_bytes == ours.offmate.plan.predicted_peak_bytes <= BUDGET
    frozen = {f"p:{name}" for name, p in reference.named_parameters() if not p.requires_grad}
    actions = ours.offmate.plan.schedule.actions
    assert frozen & {a.name for a in actions if a.kind is Kind.PREFETCH}
    assert not frozen & {a.name for a in actions if a.kind is Kind.OFFLOAD}
    ours.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path).eval()
    ids = torch.arange(3, 19)[None]
    assert torch.equal(loaded(input_ids=ids).logits, reference.eval()(input_ids=ids).logits)
