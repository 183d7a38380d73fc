"""On a CUDA card: the same numbers, the budget kept, no deadlock. Skipped where there is none.

Every test runs with deterministic kernels, whose numbers are compared bit for bit, and with the kernels that users get
by default, which add up in any order: attention has others then, with other workspace.
What can be tested without a card is tested on the simulated accelerator, in `test_accelerator.py`.
"""

from __future__ import annotations

import gc
import math
import random
import time
from typing import Any

import pytest
import torch
from offmate.runtime.devices.streams import StreamDevice

import offmate

DEVICE = "cuda"
HOST_BYTES = 8 << 30
AMPLE_BYTES = 4 << 30
LR = 1e-4
NO_CACHE = offmate.Config(cache_dir=None)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA card here"),
]

Batch = dict[str, torch.Tensor]


@pytest.fixture(autouse=True, params=[True, False], ids=["deterministic", "default"])
def exact(request, monkeypatch):
    """Whether kernels give the same bits every time; afterwards nothing of a test is left on the card."""
    if request.param:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Not warn_only: fused attention would warn and add up in any order all the same.
        torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.accelerator.empty_cache()


def llama(dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).train()


def batch(step: int) -> Batch:
    ids = torch.randint(0, 4000, (2, 256), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, fused=True)


def compiled(model: Any, budget_bytes: int) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = adamw(model.parameters())
    settings = {"device": DEVICE, "cpu_budget": HOST_BYTES, "config": NO_CACHE}
    return offmate.compile(model, budget_bytes, optimizer=optimizer, **settings), optimizer


def train(model: Any, optimizer: torch.optim.Optimizer, n_steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, n_steps):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def reference(dtype: torch.dtype, on_host: set[str], n_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain PyTorch with gradients computed on the card; those in `on_host` are stepped by the CPU's optimizer."""
    model = llama(dtype).to(DEVICE)
    named = dict(model.named_parameters())
    host = {name: torch.nn.Parameter(named[name].detach().cpu()) for name in sorted(on_host)}
    steppers = [adamw([p for n, p in named.items() if n not in on_host])] if len(on_host) < len(named) else []
    steppers += [adamw(list(host.values()))] if host else []
    losses = []
    for step in range(n_steps):
        loss = model(**{k: v.to(DEVICE) for k, v in batch(step).items()}).loss
        loss.backward()
        for name, param in host.items():
            param.grad = named[name].grad.cpu()
        for stepper in steppers:
            stepper.step()
        for name, param in host.items():
            named[name].data.copy_(param.data)
        model.zero_grad()
        losses.append(loss.item())
    return losses, {k: v.cpu() for k, v in model.state_dict().items()}


def close(model: Any) -> None:
    model._offmate_session.residence.bring_home()
    model._offmate_session.device.close()


def assert_alike(found: list[float], expected: list[float], exact: bool) -> None:
    """Losses are equal, or as close as kernels leave them that add up in any order."""
    assert all(map(math.isfinite, found))
    assert found == expected if exact else found == pytest.approx(expected, rel=2e-2)


def assert_trained_alike(found: Batch, expected: Batch, n_steps: int, exact: bool) -> None:
    """Parameters are equal, or no further apart than steps of AdamW, each of about the learning rate, can take them."""
    for name, wanted in expected.items():
        own = found[name].cpu()
        assert torch.isfinite(own).all(), name
        if exact:
            assert torch.equal(own, wanted), name
        else:
            rounding = 2 * torch.finfo(wanted.dtype).eps
            assert torch.allclose(own.float(), wanted.float(), rtol=rounding, atol=2 * n_steps * LR), name


def budget_of(level: str, dtype: torch.dtype) -> int:
    if level == "ample":
        return AMPLE_BYTES
    model = llama(dtype)
    plan = offmate.plan(
        model, AMPLE_BYTES, example_inputs=batch(0), optimizer=adamw(model.parameters()), device=DEVICE,
        cpu_budget=HOST_BYTES, config=NO_CACHE,
    )  # fmt: skip
    return plan.least_budget_bytes * (110 if level == "tight" else 160) // 100 + (32 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["ample", "middle", "tight"])
def test_numbers_and_budget(level, dtype, exact):
    """Losses and parameters are the reference's; reserved memory stays within budget and prediction."""
    budget = budget_of(level, dtype)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    model, optimizer = compiled(llama(dtype), budget)
    losses = train(model, optimizer, 1)
    assert torch.accelerator.max_memory_reserved() <= budget
    torch.accelerator.reset_peak_memory_stats()  # what was measured before the first step may take more than it
    losses += train(model, optimizer, 5, first=1)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    plan, reserved = model.offmate.plan, torch.accelerator.max_memory_reserved()
    on_host = set(plan.schedule.update_cpu_s)
    close(model)
    del model, optimizer
    gc.collect()
    expected, expected_state = reference(dtype, on_host, 5)
    assert_alike(losses, expected, exact)
    assert_trained_alike(state, expected_state, 5, exact)
    assert reserved <= plan.predicted_peak_bytes <= budget


def test_200_steps_with_delays(monkeypatch, exact):
    """Copies and workers that are late at random change nothing and block nothing."""
    budget = budget_of("tight", torch.float32)
    model, optimizer = compiled(llama(), budget)
    expected = train(model, optimizer, 20)
    close(model)
    chance = random.Random(0)
    copy, update = StreamDevice._copy, StreamDevice.update_on_host

    def late_copy(self, way, *given):
        if DEVICE == "cuda" and chance.random() < 0.3:
            with way.stream:
                torch.cuda._sleep(chance.randrange(1_000_000))
        return copy(self, way, *given)

    def late_update(self, work, *given):
        pause = chance.random() * 2e-3
        return update(self, lambda: (time.sleep(pause), work())[1], *given)

    monkeypatch.setattr(StreamDevice, "_copy", late_copy)
    monkeypatch.setattr(StreamDevice, "update_on_host", late_update)
    model, optimizer = compiled(llama(), budget)
    losses = train(model, optimizer, 200)
    assert all(map(math.isfinite, losses))
    assert_alike(losses[:20], expected, exact)
    close(model)


def test_an_update_is_the_same_on_both_kinds_of_device():
    """From equal gradients the fused updates of host and card differ by a few units in the last place at most."""
    torch.manual_seed(0)
    value, grad = torch.randn(1 << 16), torch.randn(1 << 16)
    found = []
    for where in ("cpu", DEVICE):
        param = torch.nn.Parameter(value.to(where, copy=True))
        param.grad = grad.to(where)
        adamw([param]).step()
        found.append(param.detach().cpu())
    assert torch.allclose(found[0], found[1], rtol=4 * torch.finfo(torch.float32).eps, atol=1e-9)
