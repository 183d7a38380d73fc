"""transformers' Trainer and accelerate where there is a card: the model stays in RAM, and the budget is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainingArguments

import offmate
from offmate.integrations.transformers import OffmateTrainer

from .cases import llama, words

pytestmark = pytest.mark.timeout(300)
BUDGET_BYTES = 256 << 20


def rows() -> list[dict[str, torch.Tensor]]:
    return [{name: value[0] for name, value in words().items()}] * 8


def close(model: Any) -> None:
    model._offmate_session.residence.bring_home()
    model._offmate_session.device.close()


@pytest.mark.parametrize(("settings", "evaluates_first"), [({}, False), ({"bf16": True, "max_grad_norm": 0.0}, True)])
def test_a_trainer_leaves_the_model_in_ram(tmp_path: Path, settings: dict[str, Any], evaluates_first: bool) -> None:
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, save_strategy="no",
        optim="adamw_torch_fused", report_to=[], **settings,
    )  # fmt: skip
    assert arguments.device.type == "cuda"
    model = llama()
    trainer = OffmateTrainer(model, arguments, train_dataset=rows(), eval_dataset=rows()[:2], gpu_budget=BUDGET_BYTES)
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    torch.cuda.reset_peak_memory_stats()
    if evaluates_first:
        trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    plan = trainer.model.offmate.plan
    assert torch.cuda.max_memory_reserved() <= BUDGET_BYTES and plan.predicted_peak_bytes <= BUDGET_BYTES
    close(model)


def test_accelerate_leaves_a_compiled_model_where_it_is() -> None:
    model: Any = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    offmate.compile(model, BUDGET_BYTES, optimizer=optimizer, device="cuda")
    accelerator = Accelerator()
    prepared, planned, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows(), 2))
    for batch in loader:
        assert batch["input_ids"].is_cuda
        accelerator.backward(prepared(**batch).loss)
        planned.step()
        planned.zero_grad()
    assert torch.cuda.max_memory_reserved() <= BUDGET_BYTES
    assert {param.device.type for param in model.state_dict().values()} == {"cpu"}
    close(model)
