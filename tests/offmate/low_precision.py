"""Plans that move parameters and gradients in autocast's precision in a chosen way, whether it is faster or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import offmate
from offmate.planning import planner

WAYS = ("copies", "gradients", "both")


def move(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Let plans move copies of parameters wherever they may, gradients alone, or copies of every second parameter."""
    alone = planner._search

    def search(subject: Any, *given: Any) -> Any:
        every = planner.possible(subject.traced, subject.request, subject.updater)
        low = {
            name: replace(one, copied=way == "copies" or (way == "both" and place % 2 == 0))
            for place, (name, one) in enumerate(every.items())
        }
        low = {name: one for name, one in low.items() if one.copied or one.gradient}
        return alone(planner.in_low(subject, low), *given)

    monkeypatch.setattr(planner, "_search", search)
    monkeypatch.setattr(planner, "always_tried", lambda low, request: [low])
    monkeypatch.setattr(planner, "copies_on_host", lambda *given: None)


def moved(plan: offmate.Plan | None, way: str) -> set[str]:
    """Return the parameters that move in a lower precision, with their gradients or by these alone."""
    assert plan is not None
    assert bool(plan.low) == (way != "gradients")
    assert bool(plan.low_gradients) == (way != "copies")
    return set(plan.low | plan.low_gradients)
