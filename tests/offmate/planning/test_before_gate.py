"""What a plan says of updates before the gate, where it is left open whether they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from offmate.solver.missed import missed
from offmate.solver.schedule import Kind
from offmate.solver.simulate import simulate

import offmate
from offmate.plans.break_even import break_even

from ..loops import adamw, batch, tiny
from ..training.speculating import own_cores


def planned(**config: Any) -> offmate.Plan:
    model = tiny()
    with own_cores():
        return offmate.plan(
            model, 1 << 30, example_inputs=batch(0), optimizer=adamw(model), max_grad_norm=1.0, hardware="rtx3060",
            cpu_budget=1 << 30, config=offmate.Config(**{"cache_dir": None, "updates": "host", **config}),
        )  # fmt: skip


def test_both_ways_are_planned_and_compared(tmp_path: Path) -> None:
    """The plan is the one that waits; its file has both plans' seconds, the share, and the log's bytes."""
    plan, waits, speculates = planned(speculate="auto"), planned(), planned(speculate=True)
    assert plan.schedule == waits.schedule and plan.fingerprint == waits.fingerprint
    figures = plan.break_even
    assert figures is not None and waits.break_even is None
    assert figures.gated_s == waits.predicted_step_s and figures.kept_s == speculates.predicted_step_s
    assert figures.missed_s == simulate(missed(speculates.schedule)).step_s > figures.kept_s
    assert figures.log_bytes == speculates.logged_bytes == speculates.host_bytes - waits.host_bytes > 0
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["break_even"]["share"] == figures.share
    assert offmate.load_plan(tmp_path / "plan.json").break_even == figures
    assert figures.words() in plan.explain()
    waits.save(tmp_path / "waits.json")
    assert "break_even" not in json.loads((tmp_path / "waits.json").read_text())


def test_a_file_with_seconds_that_cannot_be_is_refused(tmp_path: Path) -> None:
    plan = planned(speculate="auto")
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    for broken in ({**data["break_even"], "kept_s": -1.0}, {"kept_s": 1.0}, 3):
        (tmp_path / "plan.json").write_text(json.dumps({**data, "break_even": broken}))
        with pytest.raises(offmate.PlanFileError, match="damaged plan file"):
            offmate.load_plan(tmp_path / "plan.json")


def test_plans_that_only_search_otherwise_are_no_two_ways() -> None:
    """Where nothing is updated before the gate, a plan that might do so is not faster for it, whatever its seconds."""
    plans = (planned(updates="device", speculate=True).schedule, planned().schedule)
    faster, slower = sorted(plans, key=lambda schedule: simulate(schedule).step_s)
    assert not any(action.kind is Kind.SPECULATE_CPU for action in faster.actions + slower.actions)
    assert simulate(slower).step_s > simulate(faster).step_s
    figures = break_even(slower, faster)
    assert (figures.share, figures.log_bytes) == (0.0, 0)
    assert "would gain nothing" in figures.words()
