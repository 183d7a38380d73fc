"""transformers' Trainer, TRL's and Accelerate's loops give the numbers that they give without offmate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import offmate
from offmate import OffmateError, ProtocolError

transformers = pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from offmate.integrations.transformers import OffmateCallback, OffmateTrainer, OffmateTrainerMixin  # noqa: E402

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
STEPS = 4
TIGHT = "200KiB"  # too little for states on the device


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def rows(number: int = 10) -> list[dict[str, torch.Tensor]]:
    """Texts of one length; how many of their tokens have a label differs."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(number):
        ids = torch.randint(3, 64, (24,), generator=generator)
        labels = ids.clone()
        labels[: i + 1] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def settings(cache_dir: str) -> dict[str, Any]:
    return {"device": "emulated", "cpu_budget": "1GiB", "config": offmate.Config(cache_dir=cache_dir)}


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    common = {
        "per_device_train_batch_size": 2, "max_steps": STEPS, "logging_steps": 1, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no",
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**common, **more})


def several_gpus(args: TrainingArguments) -> TrainingArguments:
    """Arguments that believe in two visible GPUs."""
    args._n_gpu = min(args.n_gpu, 0) + 2
    return args


def history(trainer: Trainer, *names: str) -> list[dict[str, float]]:
    return [{n: row[n] for n in names if n in row} for row in trainer.state.log_history]


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


def test_an_unmodified_trainer(tmp_path, cache_dir):
    more = {"bf16": True, "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2}
    reference = Trainer(model(), arguments(tmp_path / "plain", **more), train_dataset=rows(), eval_dataset=rows(3))
    compiled = offmate.compile(model(), "4MiB", **settings(cache_dir))
    args = several_gpus(arguments(tmp_path / "ours", **more))
    ours = Trainer(compiled, args, train_dataset=rows(), eval_dataset=rows(3))
    for trainer in (reference, ours):
        trainer.train()
        trainer.evaluate()
    assert ours.args.n_gpu == 1 and ours.model_wrapped is compiled
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    assert history(ours, *names) == history(reference, *names)
    assert same(ours.model, reference.model)
    assert len(compiled.offmate.plans) == 1, "a count of items that changes makes no new plan"


def test_a_compiled_model_is_refused_by_a_trainer_that_compiles(tmp_path, cache_dir):
    compiled = offmate.compile(model(), "4MiB", **settings(cache_dir))
    trainer = OffmateTrainer(compiled, arguments(tmp_path), train_dataset=rows(), gpu_budget="4MiB", device="emulated")
    with pytest.raises(OffmateError, match=r"is already compiled by offmate.*max_grad_norm"):
        trainer.train()


def test_a_trainer_trains_its_own_model_twice(tmp_path, cache_dir):
    found = []
    for kind, more in ((Trainer, {}), (OffmateTrainer, {"gpu_budget": "4MiB", **settings(cache_dir)})):
        trainer = kind(model(), arguments(tmp_path / kind.__name__), train_dataset=rows(), **more)
        trainer.train()
        trainer.train()
        found.append(trainer)
    assert same(found[0].model, found[1].model)


class InATuple(LlamaForCausalLM):
    """Returns its loss and its logits in a tuple, as models of one's own do."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().forward(input_ids=input_ids, labels=labels)
        return found.loss, found.logits


def test_a_model_that_returns_a_tuple(tmp_path, cache_dir):
    """Its loss, which has no name, is the first output."""
    found = []
    for kind, more in ((Trainer, {}), (OffmateTrainer, {"gpu_budget": "4MiB", **settings(cache_dir)})):
        torch.manual_seed(0)
        one = InATuple(LlamaConfig(**CONFIG))
        trainer = kind(one, arguments(tmp_path / kind.__name__), train_dataset=rows(), eval_dataset=rows(3), **more)
        trainer.train()
        trainer.evaluate()
        found.append(trainer)
    names = ("loss", "grad_norm", "eval_loss")
    assert history(found[1], *names) == history(found[0], *names)
    assert same(found[1].model, found[0].model)
    kept = found[1].model.offmate.plan.schedule.item_bytes
    assert not any(item.startswith("o:linear") for item in kept), "logits that nobody reads need not stay"


class Listener(TrainerCallback):
    """A reporter that comes before what users add."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


@pytest.mark.parametrize(
    "more",
    [
        {"eval_strategy": "steps", "eval_steps": 2},
        {"bf16": True, "max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "activation_checkpointing": True},
        {"optim": "adafactor", "max_grad_norm": 0.0},
    ],
    ids=["defaults", "bf16", "adafactor"],
)
def test_the_mixin(more, tmp_path, cache_dir):
    more = {"optim": "adamw_torch_fused", **more}
    data = {"train_dataset": rows(), "eval_dataset": rows(3)}
    reference = Trainer(model(), arguments(tmp_path / "plain", **more), **data)
    listener = Listener()
    args = several_gpus(arguments(tmp_path / "ours", **more))
    ours = OffmateTrainer(model(), args, **data, callbacks=[listener], gpu_budget="4MiB", **settings(cache_dir))
    reference.train()
    ours.train()
    names = ("loss", "learning_rate", "eval_loss", *(("grad_norm",) if more.get("max_grad_norm") != 0.0 else ()))
    assert history(ours, *names) == history(reference, *names)
    assert same(ours.model, reference.model)
    plan = ours.model.offmate.plan
    first = listener.logs[0]
    assert first["offmate_peak_gib"] == first["offmate_predicted_peak_gib"] == plan.predicted_peak_bytes / 2**30
    assert {"offmate_step_s", "offmate_predicted_step_s", "offmate_stall_s"} <= first.keys()
    assert "offmate_step_s" in ours.state.log_history[0]


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


class OwnLoss(OffmateTrainer):
    """Reads the logits, as many trainers of one's own do."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        output = model(**inputs)
        loss = output.loss + 1e-4 * output.logits.float().square().mean()
        return (loss, output) if return_outputs else loss


class PlainOwnLoss(Trainer):
    compute_loss = OwnLoss.compute_loss


@pytest.mark.parametrize(("kind", "plain", "alone"), [(OffmateTrainer, Trainer, True), (OwnLoss, PlainOwnLoss, False)])
def test_logits_stay_where_somebody_reads_them(kind, plain, alone, tmp_path, cache_dir):
    """Evaluation with metrics reads them, and so may a loss of one's own."""
    more = {"optim": "adamw_torch_fused", "eval_strategy": "steps", "eval_steps": 2}
    data = {"train_dataset": rows(), "eval_dataset": rows(3), "compute_metrics": accuracy}
    reference = plain(model(), arguments(tmp_path / "plain", **more), **data)
    planned = settings(cache_dir)
    if not alone:
        planned["config"] = offmate.Config(cache_dir=cache_dir, gradients_into=("loss", "logits"))
    ours = kind(model(), arguments(tmp_path / "ours", **more), **data, gpu_budget="4MiB", **planned)
    reference.train()
    ours.train()
    names = ("loss", "grad_norm", "eval_loss", "eval_accuracy")
    assert history(ours, *names) == history(reference, *names)
    assert same(ours.model, reference.model)
    kept = any(item.startswith("o:linear") for item in ours.model.offmate.plan.schedule.item_bytes)
    assert kept is not alone


def test_resuming(tmp_path, cache_dir, monkeypatch):
    def trainer(folder: str) -> OffmateTrainer:
        args = arguments(tmp_path / folder, save_strategy="steps", save_steps=2, save_total_limit=2)
        found = model()
        for module in found.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
        return OffmateTrainer(found, args, train_dataset=rows(), gpu_budget="4MiB", **settings(cache_dir))

    whole = trainer("run")
    whole.train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert list((checkpoint / "offmate").glob("*.json"))
    assert LlamaForCausalLM.from_pretrained(checkpoint).state_dict().keys() == whole.model.state_dict().keys()
    monkeypatch.setattr("offmate.planning.planner.solve_problem", lambda *_, **__: pytest.fail("solved anew"))
    resumed = trainer("again")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert history(resumed, "loss") == history(whole, "loss")
    assert same(resumed.model, whole.model)


def test_resuming_at_another_budget_keeps_who_updates_what(tmp_path, cache_dir):
    def trainer(folder: str, budget: str) -> OffmateTrainer:
        args = arguments(tmp_path / folder, save_strategy="steps", save_steps=2)
        return OffmateTrainer(model(), args, train_dataset=rows(), gpu_budget=budget, **settings(cache_dir))

    ample, tight, resumed = trainer("ample", "64MiB"), trainer("tight", TIGHT), trainer("again", "64MiB")
    ample.train()
    tight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "tight" / "checkpoint-2"))
    stored = json.loads((tmp_path / "tight" / "checkpoint-2" / "offmate" / "split.json").read_text())
    kept = offmate.Split.from_dict(stored)
    assert ample.model.offmate.plan.split != kept == resumed.model.offmate.plan.split
    assert history(resumed, "loss") == history(ample, "loss")
    assert same(resumed.model, ample.model)


def test_the_callback_alone(tmp_path, cache_dir):
    compiled = offmate.compile(model(), "4MiB", **settings(cache_dir))
    listener = Listener()
    trainer = Trainer(
        compiled, arguments(tmp_path, save_strategy="steps", save_steps=2), train_dataset=rows(), callbacks=[listener]
    )
    OffmateCallback().add_to(trainer)
    trainer.train()
    assert "offmate_stall_s" in listener.logs[0]
    assert list((tmp_path / "checkpoint-2" / "offmate").glob("*.json"))


class ScalesOnCPU:
    """Accelerate scales losses on cards only."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.state._mixed_precision = "fp16"  # type: ignore[attr-defined]
        self.accelerator.native_amp = True  # type: ignore[attr-defined]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
        self.accelerator.scaler = scaler  # type: ignore[attr-defined]


class PlainScaled(ScalesOnCPU, Trainer):
    pass


class OursScaled(ScalesOnCPU, OffmateTrainer):
    pass


@pytest.mark.parametrize(
    "more",
    [
        {"optim": "adamw_torch_fused"},
        {"optim": "adamw_torch", "gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
        {"optim": "adamw_torch_fused", "max_grad_norm": 0.0},
    ],
    ids=["fused", "accumulation", "no-clipping"],
)
def test_float16_with_steps_that_are_skipped(more, tmp_path, cache_dir):
    more = {"max_steps": 8, "lr_scheduler_type": "cosine", "save_strategy": "steps", "save_steps": 5, **more}
    reference = PlainScaled(model(), arguments(tmp_path / "plain", **more), train_dataset=rows())
    planned = {"gpu_budget": "4MiB", **settings(cache_dir)}
    ours = OursScaled(model(), arguments(tmp_path / "ours", **more), train_dataset=rows(), **planned)
    resumed = OursScaled(model(), arguments(tmp_path / "again", **more), train_dataset=rows(), **planned)
    reference.train()
    ours.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-5"))
    names = ("loss", "learning_rate", *(("grad_norm",) if more.get("max_grad_norm") != 0.0 else ()))
    scalers = [trainer.accelerator.scaler.state_dict() for trainer in (reference, ours, resumed)]
    assert 2**16 < scalers[0]["scale"] < 2**24
    assert scalers[1:] == scalers[:1] * 2
    for trainer in (ours, resumed):
        # Norms of skipped steps may not equal themselves.
        assert repr(history(trainer, *names)) == repr(history(reference, *names))
        assert same(trainer.model, reference.model)


@pytest.mark.parametrize(
    ("asked", "words"),
    [({"torch_compile": True}, "torch_compile"), ({"auto_find_batch_size": True}, "auto_find_batch_size")],
)  # fmt: skip
def test_arguments_that_cannot_be_planned(asked, words, tmp_path):
    args = arguments(tmp_path)
    for name, value in asked.items():
        setattr(args, name, value)
    with pytest.raises(OffmateError, match=words):
        OffmateTrainer(model(), args, train_dataset=rows())


@pytest.mark.parametrize("packing", [False, True])
def test_sft_trainer_with_its_defaults(packing, tmp_path, cache_dir):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from ..finetune.finetune_kit import TEXT, VOCABULARY, make_tokenizer

    class OffmateSFTTrainer(OffmateTrainerMixin, trl.SFTTrainer):
        """As a user writes it."""

    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    texts = [{"text": text} for text in TEXT.split("\n\n")[:40] if len(text) > 200]
    trainers = []
    for kind, more in ((trl.SFTTrainer, {}), (OffmateSFTTrainer, {"gpu_budget": "6MiB", **settings(cache_dir)})):
        args = trl.SFTConfig(
            str(tmp_path / kind.__name__), per_device_train_batch_size=2, max_steps=2, logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no", max_length=48, bf16=False, packing=packing,
        )  # fmt: skip
        torch.manual_seed(0)
        fresh = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "vocab_size": VOCABULARY, "eos_token_id": 1}))
        trainer = kind(fresh, args, train_dataset=datasets.Dataset.from_list(texts), processing_class=tokenizer, **more)
        trainer.train()
        trainers.append(trainer)
    reference, ours = trainers
    names = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens")
    assert history(ours, *names) == history(reference, *names)
    assert same(ours.model, reference.model)


@pytest.mark.parametrize(("precision", "planned"), [("no", True), ("bf16", False)])
def test_accelerate(precision, planned, cache_dir):
    accelerate = pytest.importorskip("accelerate")

    def run(compiles: bool) -> list[torch.Tensor]:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        one = model().train()
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        if compiles and planned:
            offmate.compile(one, "4MiB", optimizer=optimizer, max_grad_norm=0.5, **settings(cache_dir))
        elif compiles:
            offmate.compile(one, "4MiB", **settings(cache_dir))
        loader = torch.utils.data.DataLoader(rows(8), batch_size=2)
        one, optimizer, loader, scheduler = accelerator.prepare(one, optimizer, loader, scheduler)
        losses = []
        for batch in loader:
            loss = one(**batch).loss
            accelerator.backward(loss)
            if compiles and planned:
                with pytest.raises(ProtocolError, match="max_grad_norm="):
                    accelerator.clip_grad_norm_(one.parameters(), 0.5)
            else:
                accelerator.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *accelerator.unwrap_model(one).parameters()]

    assert all(map(torch.equal, run(True), run(False)))
