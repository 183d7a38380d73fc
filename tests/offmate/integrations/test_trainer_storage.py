"""A Trainer whose states, and parameters beside float32 copies, lie in files: an unmodified Trainer's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offmate

from ...fuzz.figures import from_hardware_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

GPU_BYTES, RAM_BYTES, STEPS = 9_000_000, 46_000_000, 6


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    with from_hardware_file():
        yield


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, vocab_size=512,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def trained(kind: Any, folder: Path, resume: bool = False, **settings: Any) -> Any:
    """Train with clipping, accumulation, evaluations and checkpoints."""
    model = llama()
    optimizer = offmate.with_master_weights(torch.optim.AdamW)(model.parameters(), lr=1e-3, fused=True)
    rows = [torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(i)) for i in range(2 * 2 * STEPS)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS, logging_steps=1,
        save_steps=3, eval_strategy="steps", eval_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = kind(
        model=model, args=args, train_dataset=data, eval_dataset=data[:4], optimizers=(optimizer, None), **settings
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    return trainer


def shown(trainer: Any) -> list[dict[str, float]]:
    names = ("step", "loss", "grad_norm", "eval_loss")
    return [{name: log[name] for name in names if name in log} for log in trainer.state.log_history]


def test_losses_norms_and_weights_are_those_of_an_unmodified_trainer(tmp_path):
    from offmate.integrations.transformers import OffmateTrainer

    (tmp_path / "disk").mkdir()
    path = offmate.StoragePath(tmp_path / "disk", read="1GB/s", write="1GB/s", parameters=True)
    settings = {"gpu_budget": GPU_BYTES, "cpu_budget": RAM_BYTES, "device": "emulated", "storage": path,
                "config": offmate.Config(updates="host")}  # fmt: skip
    plain = trained(transformers.Trainer, tmp_path / "plain")
    own = trained(OffmateTrainer, tmp_path / "own", **settings)
    schedule = own.model.offmate.plan.schedule
    assert schedule.states_in_files and schedule.cast_parameters
    assert own.model.offmate.plan.host_bytes <= RAM_BYTES
    assert shown(own) == shown(plain)
    theirs = plain.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in own.model.state_dict().items())
    own.model._offmate_session.storage.close()
    again = trained(OffmateTrainer, tmp_path / "own", resume=True, **settings)
    assert shown(again)[-1] == shown(plain)[-1]
    assert all(torch.equal(value, theirs[name]) for name, value in again.model.state_dict().items())
