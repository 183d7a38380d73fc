"""The program in whole tensors: its parts are sums of tensors, and long ways to the host and back are counted."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offmate.solver.problem import Group, Problem, TensorSize
from offmate.solver.rounding.settle import settle_whole
from offmate.solver.solution import GroupFlow
from offmate.solver.solve import least_budget, solve

from ..random_problems import gated, random_problem
from ..test_gate import chain


def one_tensor(budget: int, state: int, cpu_s: float) -> Problem:
    group = Group("w", (TensorSize("w", 100, 100, state),), (0, 3), (3,), cpu_update_s=cpu_s, device_update_s=0.1)
    return replace(chain(cpu_s=cpu_s, device_s=0.1, budget=budget), groups=(group,), gate=False)


def test_all_or_nothing_of_one_tensor() -> None:
    problem = one_tensor(budget=3190, state=3000, cpu_s=0.5)
    solution = solve(problem, gap=1e-6)
    assert 0 < solution.groups["w"].cpu_part < 0.1
    whole = settle_whole(problem, solution)
    assert whole is not None and whole.groups["w"].cpu_part in (pytest.approx(0.0), pytest.approx(1.0))
    assert whole.objective_s >= solution.lower_bound_s - 1e-9
    assert max(whole.memory_bytes) <= problem.device_budget_bytes


def test_a_whole_tensor_does_one_thing_after_the_other() -> None:
    """Fractions would be updated while others leave and return; one tensor takes all of it between its two uses."""
    problem = one_tensor(budget=3190, state=3000, cpu_s=30.0)
    solution = solve(problem, gap=1e-6)
    whole = settle_whole(problem, solution)
    assert whole is not None
    if whole.groups["w"].cpu_part > 0.5:
        rates, steps = problem.rates, range(problem.first_update(problem.groups[0]), problem.n_steps)
        way_s = 100 / rates.out_bytes_per_s + 30.0 + 100 / rates.in_bytes_per_s
        assert sum(whole.step_s[t] for t in steps) >= way_s - 1e-6


def test_where_the_user_updates_there_is_nothing_to_choose() -> None:
    problem = random_problem(random.Random(1), update="external")
    assert settle_whole(problem, solve(problem)) is None


def _sums(sizes: list[int]) -> set[int]:
    return {sum(some) for n in range(len(sizes) + 1) for some in combinations(sizes, n)}


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0, 1, 3]), st.floats(0.0, 1.0))
def test_parts_are_sums_of_tensors(seed: int, tensors: int, micro_batches: int, room: float) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, tensors=tensors)
    problem = gated(problem, rng, micro_batches) if micro_batches else problem
    least, ample = least_budget(problem).bytes, max(solve(problem).memory_bytes)
    problem = replace(problem, device_budget_bytes=int(least * 1.05 + room * max(0, ample - least)))
    solution = solve(problem)
    whole = settle_whole(problem, solution)
    if whole is None:
        return
    assert max(whole.memory_bytes) <= problem.device_budget_bytes
    for group in problem.groups:
        flow = whole.groups.get(group.name, GroupFlow())
        params, states = (_sums([getattr(t, k) for t in group.tensors]) for k in ("param_bytes", "state_bytes"))
        for part, sums, size in (
            (flow.cpu_part, params, group.param_bytes),
            (sum(flow.back.values()), params, group.param_bytes),
            (sum(flow.state_out.values()), states, group.state_bytes),
            *((gap.dropped, params, group.param_bytes) for gap in flow.gaps),
        ):
            assert min(abs(part * size - one) for one in sums) <= 1e-3 * max(size, 1)
