"""A plan whose prediction is far from the first real steps says so, once, with both figures and the remedy."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import offmate
from offmate.plans.plan import Plan
from offmate.session import pace

from ..loops import AMPLE, CPU_BUDGET, adamw, batch, tiny


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still; the first entry is the time."""
    now = [0.0]
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def said(
    now: list[float],
    log: pytest.LogCaptureFixture,
    inside_s: float,
    outside_s: float,
    steps: int = 20,
    compiled: bool = False,
) -> str:
    """What is logged of steps that are predicted to take a second."""
    plan: Any = SimpleNamespace(predicted_step_s=1.0)
    counted = pace.Pace(compiled)
    with log.at_level(logging.WARNING, "offmate"):
        for step in range(steps):
            with counted.working():
                now[0] += inside_s if step >= 2 else 100.0
            now[0] += outside_s
            counted.step_done(plan)
    return log.text


def test_steps_far_from_their_prediction_are_named(seconds: list[float], caplog: pytest.LogCaptureFixture) -> None:
    text = said(seconds, caplog, 2.5, 0.0)
    assert text.count("a step takes") == 1
    for words in ("takes 2.50 s (median of steps 3 to 8)", "predicts 1.00 s", "less busy", "OFFMATE_MEASURE_AGAIN=1"):
        assert words in text
    caplog.clear()
    text = said(seconds, caplog, 0.2, 0.1)
    assert "takes 300 ms" in text and "busier than now" in text


@pytest.mark.parametrize(
    ("inside_s", "outside_s", "steps"), [(1.9, 0.0, 20), (0.6, 0.0, 20), (1.0, 9.0, 20), (9, 0, 7)]
)
def test_near_steps_slow_loaders_and_short_runs_are_not(
    seconds: list[float], caplog: pytest.LogCaptureFixture, inside_s: float, outside_s: float, steps: int
) -> None:
    assert said(seconds, caplog, inside_s, outside_s, steps) == ""


def test_compiled_blocks_may_be_faster(seconds: list[float], caplog: pytest.LogCaptureFixture) -> None:
    assert said(seconds, caplog, 0.2, 0.1, compiled=True) == ""
    assert "takes 2.50 s" in said(seconds, caplog, 2.5, 0.0, compiled=True)


@pytest.mark.parametrize("planned", [True, False])
def test_a_training_loop_is_watched(
    planned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny()
    optimizer = adamw(model)
    settings: dict[str, Any] = {"cpu_budget": CPU_BUDGET, "config": offmate.Config(cache_dir=None)}
    offmate.compile(model, AMPLE, optimizer=optimizer if planned else None, device="emulated", **settings)
    monkeypatch.setattr(Plan, "predicted_step_s", 1000.0)
    with caplog.at_level(logging.WARNING, "offmate"):
        for step in range(9):
            model(**batch(step))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert caplog.text.count("its plan predicts 1000 s") == 1
    assert "To measure again, start once with" in caplog.text
