"""What is said of other budgets holds for plans within them, behind a gate, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offmate

from ..loops import CPU_BUDGET, Tiny, batch


def plan(budget_bytes: int, **more: Any) -> offmate.Plan:
    torch.manual_seed(0)
    model = Tiny(layers=6)
    optimizer = torch.optim.AdamW(model.parameters())
    return offmate.plan(
        model, budget_bytes, example_inputs=batch(0), optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET,
        config=offmate.Config(cache_dir=None, updates="device"), **more,
    )  # fmt: skip


@pytest.mark.parametrize("more", [{"max_grad_norm": 0.3}, {"accumulation_steps": 3}])
def test_where_the_gpu_makes_all_updates_behind_a_gate(more: dict[str, Any]) -> None:
    """The least budget works, whatever was asked for first: with more steps for updates than usual if need be."""
    named = []
    for budget in (1 << 20, 4096, 12_000):
        try:
            named.append(plan(budget, **more).least_budget_bytes)
        except offmate.InfeasibleBudget as error:
            named.append(error.least_budget_bytes)
    assert named[0] == named[1] == named[2] and named[0] is not None
    assert plan(named[0], **more).predicted_peak_bytes <= named[0]


def test_a_sweep_has_the_steps_for_updates_of_plans() -> None:
    ample, tight = (plan(budget, max_grad_norm=0.3) for budget in (1 << 20, 70_000))
    assert ample.problem is not None and tight.problem is not None
    assert tight.problem.turn_around_steps > ample.problem.turn_around_steps
    (point,) = offmate.sweep(ample, [tight.budget_bytes])
    assert point.predicted_step_s == pytest.approx(tight.predicted_step_s, rel=1e-3)
