"""RAM when everything comes back from the device: it is kept to with a drive, and warned of without one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import offmate
from offmate import arguments

GPU = 60 << 20  # room for everything
RAM = 20 << 20  # less than the states' 24 MiB and the parameters' 12
ROOM = 30 << 20  # enough for the parameters and 16 MiB of buffers


def train(storage: Path | None, *, planned: bool = True, cpu_budget: int | None = RAM) -> tuple[Any, Any, list[float]]:
    """Train 12 layers of 512 for four steps with an evaluation in between; return model, optimizer and results."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if planned:
        paths = None if storage is None else [offmate.StoragePath(storage, 1e9, 1e9)]
        offmate.compile(
            model, GPU, optimizer=optimizer, device="emulated", cpu_budget=cpu_budget, storage=paths,
            config=offmate.Config(cache_dir=None),
        )  # fmt: skip
    results = []
    for step in range(4):
        batch = torch.randn(16, 512, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())
        with torch.no_grad():
            results.append(model(batch).sum().item())
    return model, optimizer, results


def values(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """All parameters and states."""
    states = (state[key] for state in optimizer.state_dict()["state"].values() for key in ("exp_avg", "exp_avg_sq"))
    return [*(param.detach() for param in model.parameters()), *states]


def test_with_a_drive_states_that_stay_on_the_gpu_have_their_homes_in_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "offmate"):
        model, optimizer, results = train(tmp_path, cpu_budget=ROOM)
    schedule = model.offmate.plan.schedule
    assert not schedule.homes and len(schedule.states_in_files) == 24
    assert schedule.rest_bytes == sum(param.nbytes for param in model.parameters()) <= ROOM
    assert not [line for line in caplog.messages if "cpu_budget" in line]
    (path,) = model.offmate.storage
    states = sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    assert path.stored_bytes >= states
    plain, plain_optimizer, expected = train(None, planned=False)
    assert results == expected
    assert all(map(torch.equal, values(model, optimizer), values(plain, plain_optimizer)))


def test_without_a_drive_a_warning_names_the_bytes_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "offmate"):
        model, optimizer, _ = train(None)
    (said,) = [line for line in caplog.messages if "cpu_budget" in line]
    assert "needs 36.1 MiB when values that stay on the GPU are copied back" in said
    assert "more than the 20 MiB of cpu_budget" in said and "storage=" in said
    states = sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    assert model.offmate.plan.schedule.rest_bytes == states + sum(param.nbytes for param in model.parameters())


def test_nothing_is_said_where_ram_holds_everything(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "offmate"):
        train(None, cpu_budget=64 << 20)
    assert not [line for line in caplog.messages if "cpu_budget" in line]


@pytest.mark.parametrize(("free", "says"), [(30 << 20, False), (20 << 20, True)])
def test_the_model_as_it_was_loaded_belongs_to_what_is_there(
    free: int, says: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 MiB are enough for the states, 24, and 20 are not; the parameters, 12, were there before."""
    monkeypatch.setattr(arguments, "default_host_budget_bytes", lambda: free)
    with caplog.at_level(logging.WARNING, "offmate"):
        train(None, cpu_budget=None)
    said = [line for line in caplog.messages if "cpu_budget" in line]
    assert bool(said) is says and all(f"more than the {30 if not says else 32} MiB" in line for line in said)
