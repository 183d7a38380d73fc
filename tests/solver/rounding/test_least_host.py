"""The whole tensors with the fewest bytes on the host."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from offmate.solver.plan import plan
from offmate.solver.rounding import least_host
from offmate.solver.rounding.least_host import settle_least_host
from offmate.solver.solve import solve

from ..random_problems import random_problem
from ..test_brute_force import random_plan


@pytest.mark.parametrize("seed", [1, 2, 4, 5, 7, 8])
def test_no_whole_plan_needs_fewer_bytes_on_the_host(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, n_blocks=2, tensors=1, tied=seed % 2 == 0)
    plans = [random_plan(problem, rng) for _ in range(400)]
    for _, device, host, _ in (min(plans, key=lambda p, k=k: p[k]) for k in (1, 2)):
        tight = replace(problem, device_budget_bytes=int(device), host_budget_bytes=int(host))
        settled = list(settle_least_host(tight, solve(tight), (int(host),)))
        assert len(settled) == 1 and settled[0].host_bytes <= host
        assert plan(tight, ladder=()).schedule is not None


def test_the_budgets_end_where_no_whole_tensors_fit() -> None:
    problem = random_problem(random.Random(1), n_blocks=3, tensors=2)
    problem = replace(problem, device_budget_bytes=max(solve(problem).memory_bytes) // 2)
    solution = solve(problem)
    assert len(list(settle_least_host(problem, solution, (10**6, 10**6)))) == 2
    assert len(list(settle_least_host(problem, solution, (10**6, 0, 10**6)))) == 1


def test_many_tensors_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(random.Random(1), n_blocks=2, tensors=1)
    solution = solve(problem)
    assert list(settle_least_host(problem, solution, (10**6,)))
    monkeypatch.setattr(least_host, "COUNTED", 3)
    assert not list(settle_least_host(problem, solution, (10**6,)))
