"""What surrounds training: encoder-decoders, hidden states, autocast, evaluation, and every option with dropout."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import offmate
from offmate.lowering import options
from offmate.lowering.options import BlockClass
from offmate.profile import store as measured

from ..parity import AMPLE, AMPLE_BYTES, HOST_BYTES, LEAST, Batch, Case, adamw, built, check, reference, same_bits
from .test_parity_language import VOCABULARY, text_batches, text_case
from .test_parity_models import Decoder, convolutions, pictures, token_case, vector_case

transformers = pytest.importorskip("transformers")


def tiny_t5() -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.1,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def translations() -> list[Batch]:
    return [
        {"input_ids": batch["input_ids"], "labels": batch["labels"][:, :32].contiguous(), "use_cache": False}
        for batch in text_batches(length=48)
    ]


@pytest.mark.parametrize("budget", [AMPLE, LEAST])
def test_encoder_decoder(budget: str, cache_dir: str) -> None:
    check(Case("t5", tiny_t5, translations), budget, cache_dir)


def with_hidden_states(batch: Batch) -> dict[str, Any]:
    return {**batch, "output_hidden_states": True}


@pytest.mark.parametrize("budget", [AMPLE, LEAST])
def test_hidden_states(budget: str, cache_dir: str) -> None:
    check(text_case("llama", "padding", "-hidden", inputs=with_hidden_states), budget, cache_dir)


def in_bfloat16() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "case",
    [
        token_case("autocast", Decoder, around=in_bfloat16),
        vector_case("autocast-convolutions", convolutions, batches=pictures, around=in_bfloat16),
        text_case("llama", "padding", "-autocast", around=in_bfloat16),
    ],
    ids=["decoder", "convolutions", "llama"],
)
def test_autocast_around_the_call(case: Case, cache_dir: str) -> None:
    least = offmate_least(case, cache_dir)
    check(case, least, cache_dir)


def offmate_least(case: Case, cache_dir: str) -> int:
    model = built(case)
    with case.around():
        plan = offmate.plan(
            model, AMPLE_BYTES, example_inputs=case.inputs(case.batches()[0]), optimizer=case.optimizer(model),
            device="emulated", cpu_budget=HOST_BYTES, config=offmate.Config(cache_dir=cache_dir),
        )  # fmt: skip
    return plan.least_budget_bytes


@pytest.mark.parametrize("nth", range(4))
def test_dropout_at_every_option(nth: int, cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is drawn once, whatever is kept, recomputed or offloaded around it."""
    original = options.class_options
    chosen: list[str] = []

    def only_nth(*args: Any, **kwargs: Any) -> BlockClass:
        found = original(*args, **kwargs)
        option = found.options[nth % len(found.options)]
        chosen.append(option.name)
        draws = [i for i in option.programs.backward.instructions if "dropout" in str(i.target)]
        assert not [i for i in draws if "backward" not in str(i.target)]
        return BlockClass(found.graph, (option,))

    monkeypatch.setattr(options, "class_options", only_nth)
    monkeypatch.setattr(measured, "_kept", {})
    case = token_case(f"dropout-{nth}", lambda: Decoder(dropout=0.2))
    check(case, AMPLE_BYTES, None)
    assert chosen


def compiled(case: Case, model: torch.nn.Module, cache_dir: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    optimizer = case.optimizer(model)
    budget = max(offmate_least(case, cache_dir), reference(case).peak_bytes // 2)
    return (
        offmate.compile(
            model, budget, optimizer=optimizer, device="emulated", cpu_budget=HOST_BYTES,
            config=offmate.Config(cache_dir=cache_dir),
        ),
        optimizer,
    )  # fmt: skip


def alternating(case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Train, evaluate, train: everything that comes out."""
    torch.manual_seed(9)
    seen = []
    batches = case.batches()
    for step in range(3):
        given = case.inputs(batches[step % len(batches)])
        loss = case.loss(model(*given) if isinstance(given, tuple) else model(**given), batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
        model.eval()
        with torch.no_grad():
            output = model(*given) if isinstance(given, tuple) else model(**given)
        seen += [t.clone() for t in torch.utils._pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
                 if isinstance(t, torch.Tensor)]  # fmt: skip
        model.train()
    return [*seen, *(v.clone() for v in model.state_dict().values())]


@pytest.mark.parametrize(
    "case",
    [
        token_case("dropout", lambda: Decoder(dropout=0.2)),
        vector_case("convolutions", convolutions, batches=pictures),
        text_case("llama", "padding", "-modes", inputs=lambda batch: {**batch, "use_cache": False}),
    ],
    ids=["dropout", "convolutions", "llama"],
)
def test_train_evaluate_train(case: Case, cache_dir: str) -> None:
    plain, model = built(case), built(case)
    expected = alternating(case, plain, case.optimizer(plain))
    model, optimizer = compiled(case, model, cache_dir)
    same_bits("train, evaluate, train", expected, alternating(case, model, optimizer))
    assert model.offmate.peak_bytes <= model.offmate.plan.budget_bytes


def test_planning_leaves_everything_untouched(cache_dir: str) -> None:
    case = vector_case("untouched", convolutions, batches=pictures)
    model = built(case)
    for index, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, float(index))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    batch = case.batches()[0]["x"]
    kept, random_state = batch.clone(), torch.get_rng_state()
    offmate.plan(
        model, AMPLE_BYTES, example_inputs=(batch,), optimizer=adamw(model), device="emulated", cpu_budget=HOST_BYTES,
        config=offmate.Config(cache_dir=None),
    )  # fmt: skip
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(batch, kept)
    same_bits("buffers and parameters", list(before.values()), list(model.state_dict().values()))
    same_bits("gradients", grads, [p.grad for p in model.parameters()])
    assert model.training


_THREADS = """
import threading
import torch
from offmate.runtime.devices.emulated import EmulatedDevice
EmulatedDevice(1 << 20).close()
seen = [torch.get_num_threads()]
other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
other.start(); other.join()
print(*seen)
"""


def test_workers_leave_the_number_of_threads_alone() -> None:
    """Sums of small products depend on it, so plain PyTorch in the same process would give other bits."""
    fresh, several = [sys.executable, "-c", _THREADS], os.environ | {"OMP_NUM_THREADS": "2"}
    found = subprocess.run(fresh, capture_output=True, text=True, env=several)
    assert found.stdout.split() == ["2", "2"], found.stderr
