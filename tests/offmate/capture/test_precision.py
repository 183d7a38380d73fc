"""Low precision: bfloat16, float32 copies that are updated, autocast, and scaled float16 gradients."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch

import offmate
from offmate import ProtocolError

from ..loops import CPU_BUDGET, Loop, Tiny, assert_same, batch, compiled


def low(dtype: torch.dtype = torch.bfloat16) -> Tiny:
    torch.manual_seed(0)
    return Tiny(layers=2).to(dtype)


def taken(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    given = batch(step)
    return {"x": given["x"].to(dtype), "y": given["y"]}


def run(loop: Loop, first: int, end: int, dtype: torch.dtype = torch.bfloat16) -> list[float]:
    losses = []
    for step in range(first, end):
        loss = loop.model(**taken(step, dtype))["loss"]
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made(kind, compiles: bool, **settings) -> Loop:
    model = low()
    optimizer = kind(model.parameters(), lr=1e-2, **settings)
    if compiles:
        offmate.compile(
            model, 26 << 10, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET,
            config=offmate.Config(cache_dir=None),
        )  # fmt: skip
    return Loop(model, optimizer)


MASTERED = offmate.with_master_weights(torch.optim.AdamW)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, MASTERED], ids=["plain", "masters"])
def test_bfloat16(kind):
    ours, reference = made(kind, True, fused=True), made(kind, False, fused=True)
    assert run(ours, 0, 4) == run(reference, 0, 4)
    assert_same(ours, reference)
    assert kind is torch.optim.AdamW or any(ours.model.offmate.plan.moved_bytes)


def test_masters_are_what_a_loop_with_copies_does():
    ours, model = made(MASTERED, False, weight_decay=0.1), low()
    copies = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(copies, lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(ours.optimizer, 0.5)
    for step in range(3):
        run(ours, step, step + 1)
        scheduler.step()
        model(**taken(step, torch.bfloat16))["loss"].backward()
        for param, own in zip(model.parameters(), copies):
            own.grad, param.grad = param.grad.float(), None
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        with torch.no_grad():
            for param, own in zip(model.parameters(), copies):
                param.copy_(own)
    assert all(map(torch.equal, ours.model.parameters(), model.parameters()))
    masters = [ours.optimizer.state[p]["master"] for p in ours.model.parameters()]
    assert all(map(torch.equal, masters, copies))


def test_masters_are_saved_in_float32():
    ours = made(MASTERED, True, fused=True)
    run(ours, 0, 2)
    saved = io.BytesIO()
    torch.save((ours.model.state_dict(), ours.optimizer.state_dict()), saved)
    rest = run(ours, 2, 4)
    for compiles in (True, False):
        saved.seek(0)
        model, optimizer = torch.load(saved, weights_only=True)
        other = made(MASTERED, compiles, fused=True)
        other.model.load_state_dict(model)
        other.optimizer.load_state_dict(copy.deepcopy(optimizer))
        assert run(other, 2, 4) == rest
        assert_same(other, ours)


def test_scaled_gradients_are_refused_with_a_planned_optimizer_that_knows_no_scaler():
    loop, scaler = compiled("ample", steps=1), torch.amp.GradScaler("cpu")
    scaler.scale(loop.forward(1)).backward()
    with pytest.raises(ProtocolError, match=r"GradScaler.*grad_scaler= to offmate.compile.*without optimizer="):
        scaler.step(loop.optimizer)


def test_scaled_gradients_without_one():
    losses = []
    for compiles in (True, False):
        model = low(torch.float32)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu")
        if compiles:
            offmate.compile(model, "1MiB", device="emulated", config=offmate.Config(cache_dir=None))
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(**batch(step))["loss"]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


class Mixed(torch.nn.Module):
    """Layers of three precisions."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (33, 77, 55, 66, 31, 44)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.layers[1].double()
        self.layers[3].bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.float().pow(2).mean()


@pytest.mark.parametrize("max_norm", [0.5, 0.01])
def test_clipping_several_precisions(max_norm):
    """PyTorch adds norms dtype by dtype, in an order of its own."""
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model = Mixed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if compiles:
            offmate.compile(
                model, 1 << 30, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, max_grad_norm=max_norm,
                config=offmate.Config(cache_dir=None),
            )  # fmt: skip
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(3, 33) * 5).backward()
            if not compiles:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        found.append([value.clone() for value in model.state_dict().values()])
    assert all(map(torch.equal, *found))
