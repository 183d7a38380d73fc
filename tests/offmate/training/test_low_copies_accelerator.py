"""Low copies on a device with memory, streams and an allocator of its own, under random delays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import offmate
from offmate.planning.placement import holdings, rehearsals

from ...fuzz.figures import from_hardware_file
from ..low_precision import WAYS, move, moved
from .test_accelerator import AMPLE_BYTES, HOST_BYTES, NO_CACHE, STEPS, adamw, built, large, text


@pytest.fixture(scope="module", autouse=True)
def rates() -> Iterator[None]:
    with from_hardware_file(workspaces=True):
        yield


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What moves in the lower precision."""
    move(monkeypatch, request.param)
    return str(request.param)


def steps(model: Any, optimizer: torch.optim.Optimizer, clip: float | None) -> list[float]:
    losses = []
    for step in range(STEPS):
        batch = {name: value.to("sim") for name, value in text(step).items()}
        with torch.autocast("sim", torch.bfloat16):
            loss = model(**batch)["loss"]
        loss.backward()
        losses.append(loss.item())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("way", "clip", "updates", "tight"),
    [
        ("copies", 0.1, "device", True),
        ("copies", 0.1, "auto", False),
        ("gradients", 0.1, "host", True),
        ("gradients", 0.1, "device", False),
        ("both", None, "auto", True),
        ("both", 0.1, "host", True),
    ],
    indirect=["way"],
)
def test_numbers_and_budget(sim: Any, way: str, clip: float | None, updates: Any, tight: bool) -> None:
    plain = built("llama").to("sim")
    losses = steps(plain, adamw(plain), clip)
    model = built("llama")
    optimizer, config = adamw(model), replace(NO_CACHE, updates=updates)
    settings: dict[str, Any] = {
        "optimizer": optimizer, "device": "sim", "cpu_budget": HOST_BYTES, "config": config, "max_grad_norm": clip,
    }  # fmt: skip
    budget = AMPLE_BYTES
    if tight:
        with torch.autocast("sim", torch.bfloat16):
            budget = offmate.plan(model, AMPLE_BYTES, example_inputs=text(0), **settings).least_budget_bytes
    sim.reset_peak_memory_stats()
    offmate.compile(model, budget, **settings)
    try:
        sim.set_delays(1, 200)
        assert steps(model, optimizer, None) == losses
        sim.set_delays(0, 0)
        plan = model.offmate.plan
        assert moved(plan, way)
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name].cpu(), value.cpu()), name
        assert model.offmate.peak_bytes == plan.predicted_peak_bytes
        assert sim.max_memory_reserved() <= plan.predicted_peak_bytes <= budget
    finally:
        model._offmate_session.residence.bring_home()
        model._offmate_session.device.close()


def test_an_iteration_allocates_what_was_rehearsed(sim: Any, way: str) -> None:
    """A parameter comes with its state before its first update, which makes the rest of the state."""
    model = built("llama")
    optimizer = adamw(model)
    settings: dict[str, Any] = {
        "device": "sim",
        "cpu_budget": HOST_BYTES,
        "config": replace(NO_CACHE, updates="device"),
    }
    offmate.compile(model, AMPLE_BYTES, optimizer=optimizer, **settings)
    try:
        seen = []
        for _ in range(3):
            with sim.watched() as changes, torch.autocast("sim", torch.bfloat16):
                model(**text(0))["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append(large(size for _, size in changes))
        session = model._offmate_session
        prepared = session.training.prepared
        held = holdings(model, session.updater, torch.device("sim:0"), prepared.low)
        fresh, _ = rehearsals(prepared, model, held)
        _, _, *rehearsed = [large(change.bytes for change in stretch) for stretch in fresh.played(3)]
        assert prepared.low
        assert seen[1:] == rehearsed  # planning is in the first one
    finally:
        model._offmate_session.residence.bring_home()
        model._offmate_session.device.close()


def test_where_no_memory_can_be_pinned(sim: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's memory stays the parameter's: what the device has updated is in the state_dict."""
    plain = built("llama").to("sim")
    losses = steps(plain, adamw(plain), None)
    model = built("llama")
    optimizer = adamw(model)
    monkeypatch.setattr("offmate.session.host_state.Truth.pin", lambda *given, **more: None)
    config = replace(NO_CACHE, updates="device")
    offmate.compile(model, AMPLE_BYTES, optimizer=optimizer, device="sim", cpu_budget=HOST_BYTES, config=config)
    try:
        assert steps(model, optimizer, None) == losses
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name].cpu(), value.cpu()), name
        assert moved(model.offmate.plan, way)
    finally:
        model._offmate_session.residence.bring_home()
        model._offmate_session.device.close()
