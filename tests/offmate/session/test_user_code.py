"""What the user's code holds between forward and backward is measured, whatever else goes meanwhile."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import offmate
from offmate.planning import planner

MIB = 1 << 20
WIDTH, BUDGET = 256, 4 * MIB
FEW, MANY = 2, 20  # values of the loss that have room in the plan that was made for usual ones, and that have none


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The reserves for which a plan was searched, but for the least budget that has a place on a card."""
    found: list[int] = []
    search = planner._fastest

    def watched(subject: Any, *rest: Any) -> Any:
        if not subject.request.margin_bytes:
            found.append(subject.request.user_bytes)
        return search(subject, *rest)

    monkeypatch.setattr(planner, "_fastest", watched)
    return found


def made() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def compiled(plan: offmate.Plan | None = None, budget: int = BUDGET) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = made()
    config = offmate.Config(cache_dir=None)
    offmate.compile(model, budget, optimizer=optimizer, device="emulated", config=config, plan=plan)
    return model, optimizer


def trained(
    model: Any, optimizer: torch.optim.Optimizer, n_values: int, steps: int = 3, device: str = "cpu"
) -> list[torch.Tensor]:
    """Train with a loss outside the model that holds many values; return losses and parameters."""
    losses = []
    for step in range(steps):
        batch = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))
        out = model(batch.to(device))
        held = [out * factor for factor in range(1, n_values + 1)]
        loss = torch.stack([value.square().mean() for value in held]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def same(found: list[torch.Tensor], n_values: int) -> bool:
    return all(map(torch.equal, found, trained(*made(), n_values)))


def test_what_was_kept_from_another_batch_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    offmate.compile(model, "64MiB", optimizer=optimizer, device="emulated", config=offmate.Config(cache_dir=None))
    kept: list[torch.Tensor] = []
    for rows in (2, 4):
        with caplog.at_level(logging.INFO, "offmate"):
            out = model(torch.ones(rows, 8))
            kept.clear()
            kept.append(torch.zeros(3 * MIB, dtype=torch.uint8))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.offmate.sync()
    held = [record.getMessage() for record in caplog.records if "your code holds" in record.getMessage()]
    assert held == ["your code holds 3 MiB between forward and backward"] * 2


def test_a_plan_that_has_room_for_what_the_code_holds_stays(searches: list[int]) -> None:
    model, optimizer = compiled()
    before = trained(model, optimizer, FEW, steps=1)
    first = model.offmate.plan
    model, optimizer = compiled(first)
    found = trained(model, optimizer, FEW)
    plan = model.offmate.plan
    assert before[0] == found[0] and same(found, FEW)
    assert len(searches) == 1, "only the first plan was searched"
    assert plan.user_bytes > first.user_bytes and plan.fingerprint != first.fingerprint
    assert plan.schedule.actions == first.schedule.actions
    assert model.offmate.peak_bytes == plan.predicted_peak_bytes <= BUDGET


def test_the_least_budget_of_a_plan_that_stays_works_with_the_larger_reserve() -> None:
    model, optimizer = compiled()
    trained(model, optimizer, FEW)
    least = model.offmate.plan.least_budget_bytes
    model, optimizer = compiled(budget=least)
    assert same(trained(model, optimizer, FEW), FEW)
    with pytest.raises(offmate.InfeasibleBudget):
        model, optimizer = compiled(budget=least - 4096)
        trained(model, optimizer, FEW)


def test_a_plan_without_room_is_made_again(searches: list[int]) -> None:
    model, optimizer = compiled()
    found = trained(model, optimizer, MANY)
    plan = model.offmate.plan
    assert same(found, MANY)
    assert len(searches) == 2 and searches[1] == plan.user_bytes > searches[0]
    assert plan.predicted_peak_bytes <= BUDGET


@pytest.mark.parametrize("n_values", [FEW, MANY])
def test_plans_with_a_larger_reserve_can_be_given_and_loaded(
    tmp_path: Path, searches: list[int], n_values: int
) -> None:
    model, optimizer = compiled()
    trained(model, optimizer, n_values)
    plan = model.offmate.plan
    plan.save(tmp_path / "plan.json")
    model.offmate.save_plans(tmp_path / "plans")
    searches.clear()

    given, optimizer = compiled(offmate.load_plan(tmp_path / "plan.json"))
    assert same(trained(given, optimizer, n_values), n_values)
    assert given.offmate.plan.fingerprint == plan.fingerprint

    loaded, optimizer = compiled()
    loaded.offmate.load_plans(tmp_path / "plans")
    assert same(trained(loaded, optimizer, n_values), n_values)
    assert loaded.offmate.plan.fingerprint == plan.fingerprint
    assert not searches


def test_a_given_plan_with_a_larger_reserve_still_has_to_be_for_the_same_request() -> None:
    model, optimizer = compiled()
    trained(model, optimizer, MANY)
    other, optimizer = made()
    config = offmate.Config(cache_dir=None)
    offmate.compile(other, BUDGET + MIB, optimizer=optimizer, device="emulated", config=config, plan=model.offmate.plan)
    with pytest.raises(offmate.PlanFileError, match=r"budget 4 MiB in the plan, 5 MiB now"):
        trained(other, optimizer, MANY, steps=1)


def test_on_an_accelerator_a_plan_that_stays_has_a_place(sim: Any, searches: list[int]) -> None:
    def fused(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    plain = made()[0].to("sim")
    expected = [value.cpu() for value in trained(plain, fused(plain), MANY, device="sim")]
    sim.reset_peak_memory_stats()
    model = made()[0]
    optimizer, config, budget = fused(model), offmate.Config(cache_dir=None), 64 * MIB
    offmate.compile(model, budget, optimizer=optimizer, device="sim", cpu_budget=1 << 30, config=config)
    found = [value.cpu() for value in trained(model, optimizer, MANY, device="sim")]
    assert all(map(torch.equal, found, expected))
    assert model.offmate.plan.user_bytes > searches[0] and model.offmate.plan.user_bytes not in searches
    assert sim.max_memory_reserved() <= budget
    model._offmate_session.residence.bring_home()
    model._offmate_session.device.close()
