"""On a CUDA card: every way to train has the numbers of plain PyTorch there, within its budget, with what moves moving.

One side makes all updates, the CPU or the card, so that plain PyTorch needs to know of no split. Kernels are
deterministic, so that bits are compared.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from offmate.runtime.storage.engine import Engine
from offmate.solver.schedule import Kind

import offmate
from offmate.session import state_storage

from .test_cuda import AMPLE_BYTES, DEVICE, HOST_BYTES, adamw, close, pytestmark

__all__ = ["pytestmark"]

STEPS = 4
LEAST_SCALE = 2.0**8


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Parameters
    ----------
    updates: the side that makes them. micro: micro-batches of an update. clip: the largest norm. cast: the dtype of
        autocast. scales: with a GradScaler. ram: how much of it there is, as a share of parameters, gradients and
        states; what does not fit is in files. config: further fields of Config. dropout: of the model.
    """

    updates: Literal["host", "device"] = "host"
    micro: int = 1
    clip: float | None = None
    cast: torch.dtype | None = None
    scales: bool = False
    ram: float | None = None
    dropout: bool = False
    dtype: torch.dtype = torch.float32
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def by_block(self) -> bool:
        return self.config.get("accumulation_order") == "by block"


WAYS = {
    "gate, CPU": Way(clip=0.1),
    "gate, card": Way("device", clip=0.1),
    "never clips": Way(clip=1e6),
    "micro-batches": Way(micro=3),
    "micro-batches, gate, card": Way("device", micro=2, clip=0.1),
    "by block": Way(micro=3, config={"accumulation_order": "by block"}),
    "by block, gate": Way(micro=3, clip=0.1, config={"accumulation_order": "by block"}),
    "early, kept": Way(clip=1e6, config={"speculate": True}),
    "early, undone": Way(clip=0.1, config={"speculate": True}),
    "autocast, CPU": Way(cast=torch.bfloat16, clip=0.1),
    "autocast, card": Way("device", cast=torch.bfloat16),
    "bfloat16, micro-batches": Way(micro=2, dtype=torch.bfloat16),
    "scaler": Way("device", cast=torch.float16, scales=True, clip=0.1),
    "dropout": Way("device", dropout=True),
    "states in files": Way("device", ram=0.4),
}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels give the same bits every time; afterwards nothing of a test is left on the card."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.accelerator.empty_cache()


def built(way: Way) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if way.dropout:
        return GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=512, n_layer=2, n_head=8, n_positions=96)).train()
    config = LlamaConfig(
        vocab_size=1000, hidden_size=640, intermediate_size=1536, num_hidden_layers=2 if way.ram is None else 8,
        num_attention_heads=10, num_key_value_heads=5, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(way.dtype).train()


def batches(way: Way) -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(0, 1000, (STEPS * way.micro, 2, 96), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def casting(way: Way) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(DEVICE, way.cast) if way.cast is not None else contextlib.nullcontext()


def scaler_of(way: Way) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE, init_scale=LEAST_SCALE, enabled=way.scales)


def tight_bytes(way: Way, model: Any, settings: dict[str, Any]) -> tuple[int, int]:
    """A budget of the card in which most has to move, and RAM as the way has it."""
    whole = 4 * sum(param.nbytes for param in model.parameters())
    ram = HOST_BYTES if way.ram is None else int(way.ram * whole)
    with casting(way):
        plan = offmate.plan(model, AMPLE_BYTES, example_inputs=batches(way)[0], cpu_budget=ram, **settings)
    assert plan.least_budget_bytes is not None
    return plan.least_budget_bytes * 120 // 100 + (32 << 20), ram


@dataclass
class Found:
    """What a loop had: losses, norms, parameters."""

    losses: list[float]
    norms: list[torch.Tensor]
    state: dict[str, torch.Tensor]


def ours(way: Way, folder: Path) -> Found:
    model = built(way)
    optimizer, scaler = adamw(model.parameters()), scaler_of(way)
    drive = offmate.StoragePath(folder, read="1GB/s", write="1GB/s", parameters=True)
    settings: dict[str, Any] = {
        "optimizer": optimizer, "device": DEVICE, "accumulation_steps": way.micro, "max_grad_norm": way.clip,
        "grad_scaler": scaler if way.scales else None,
        "config": offmate.Config(cache_dir=str(folder), updates=way.updates, **way.config),
        "storage": drive if way.ram is not None else None,
    }  # fmt: skip
    budget, ram_bytes = tight_bytes(way, model, settings)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    offmate.compile(model, budget, cpu_budget=ram_bytes, **settings)
    torch.manual_seed(7)
    losses, norms = [], []
    given = model.offmate.batches(batches(way)) if way.by_block else batches(way)
    for number, one in enumerate(given, 1):
        with casting(way):
            loss = model(**one).loss / way.micro
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if number % way.micro == 0:
            if way.scales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if number == way.micro:  # what was measured before the first step may take more, within the budget
                assert torch.accelerator.max_memory_reserved() <= budget
                torch.accelerator.reset_peak_memory_stats()
            if way.clip is not None:
                norms.append(model.offmate.grad_norm.cpu().clone())
    plan, reserved = model.offmate.plan, torch.accelerator.max_memory_reserved()
    assert any(plan.stored_bytes) == (way.ram is not None)
    assert (plan.schedule.per_step > 1) == way.by_block
    assert any(action.kind is Kind.SPECULATE_CPU for action in plan.schedule.actions) == ("speculate" in way.config)
    assert reserved <= plan.predicted_peak_bytes <= budget
    assert model.offmate.peak_bytes <= plan.predicted_peak_bytes
    found = Found(losses, norms, {name: value.cpu().clone() for name, value in model.state_dict().items()})
    close(model)
    return found


def plain(way: Way, norms: list[torch.Tensor]) -> Found:
    """Plain PyTorch on the card; with updates of the CPU, its optimizer there has the card's gradients.

    The norms that clip are those that were found, once they are seen to be right: sums of squares round by their order.
    """
    model = built(way).to(DEVICE)
    model.tie_weights()  # some devices untie them
    params = list(model.parameters())
    trained = params if way.updates == "device" else [torch.nn.Parameter(p.detach().cpu()) for p in params]
    optimizer, scaler = adamw(trained), scaler_of(way)
    torch.manual_seed(7)
    losses = []
    for number, one in enumerate(batches(way), 1):
        with casting(way):
            loss = model(**{name: value.to(DEVICE) for name, value in one.items()}).loss / way.micro
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if number % way.micro:
            continue
        if way.scales:
            scaler.unscale_(optimizer)
        if trained is not params:
            for own, param in zip(trained, params):
                own.grad = param.grad.cpu()
        if way.clip is not None:
            norm = norms[number // way.micro - 1]
            grads = [param.grad for param in trained]
            assert norm.item() == pytest.approx(torch.nn.utils.get_total_norm(grads).item(), rel=1e-3)
            torch.nn.utils.clip_grads_with_norm_(trained, way.clip, norm.to(trained[0].device))
        scaler.step(optimizer)
        scaler.update()
        if trained is not params:
            for own, param in zip(trained, params):
                param.data.copy_(own.data)
        model.zero_grad()
        optimizer.zero_grad()
    return Found(losses, norms, {name: value.cpu() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("name", WAYS)
def test_numbers_are_those_of_plain_pytorch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way = WAYS[name]
    # Small requests beside a small model.
    monkeypatch.setattr(state_storage, "Engine", functools.partial(Engine, n_threads=2, request_bytes=1 << 18))
    found = ours(way, tmp_path)
    gc.collect()
    expected = plain(way, found.norms)
    assert found.losses == expected.losses
    differing = {key: (found.state[key].float() - value.float()).abs().max().item()
                 for key, value in expected.state.items() if not torch.equal(found.state[key], value)}  # fmt: skip
    assert not differing
