"""A plan that a run of the tests uses again is the one that the solver makes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from offmate.solver.plan import Planned, plan
from offmate.solver.problem import Problem

from ...fuzz import solved
from ...solver.random_problems import random_problem


def test_what_was_solved_is_not_solved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFMATE_TESTS_SOLVED", str(tmp_path))
    asked = []

    def counted(problem: Problem, **how: Any) -> Planned:
        asked.append(problem)
        return plan(problem, **how)

    once, problem = solved._once("plan", counted), random_problem(random.Random(0), n_blocks=2)
    first, second = once(problem, gap=0.01), once(problem, gap=0.01)
    assert first.schedule == second.schedule == plan(problem, gap=0.01).schedule is not None
    assert asked == [problem]
    other = replace(problem, host_budget_bytes=problem.host_budget_bytes + 1)
    assert once(other, gap=0.01).schedule == plan(other, gap=0.01).schedule
    once(problem, gap=0.02)
    assert asked == [problem, other, problem]


def test_what_is_remembered_is_what_users_get() -> None:
    problem = random_problem(random.Random(1), n_blocks=2)
    heard: list[Any] = []
    found = [solved._remembered(problem, heard.append, gap=0.01) for _ in range(2)]
    expected: list[Any] = []
    assert found[0] is found[1] and found[0].schedule == plan(problem, gap=0.01, report=expected.append).schedule
    assert [gain.name for gain in heard] == 2 * [gain.name for gain in expected]
