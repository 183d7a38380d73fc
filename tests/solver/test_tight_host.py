"""A host that holds little more than the program's fractions: whole tensors still find a plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from offmate.solver.decisions import Decisions
from offmate.solver.plan import plan, planned_host
from offmate.solver.problem import Problem
from offmate.solver.rounding.groups import round_solution
from offmate.solver.scheduling.validate import validate
from offmate.solver.simulate import keeps_budgets
from offmate.solver.solve import least_budget, least_host_within_device, solve

from .random_problems import gated, in_rows, random_problem
from .test_host_in_time import thousandfold


def random_case(seed: int) -> Problem:
    """A problem with or without a gate and micro-batches; its device has a tenth to two fifths more than the least."""
    rng = random.Random(seed)
    problem = random_problem(rng, n_blocks=rng.choice([3, 4, 5]), tensors=rng.choice([2, 3, 4]), tied=seed % 2 == 0)
    if seed % 3:
        problem = gated(problem, rng, 3 if seed % 3 == 2 and seed % 4 == 0 else 1)
    problem = replace(thousandfold(problem), host_budget_bytes=10**9)
    return replace(problem, device_budget_bytes=int(rng.choice([1.1, 1.2, 1.4]) * least_budget(problem).bytes))


@pytest.mark.parametrize("in_time", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_plan_is_found_where_fractions_and_one_more_tensor_fit(seed: int, in_time: bool) -> None:
    problem = replace(random_case(seed), host_in_time=in_time)
    least = least_host_within_device(problem)
    assert least is not None
    largest = max(t.param_bytes + t.grad_bytes + t.state_bytes for group in problem.groups for t in group.tensors)
    tight = replace(problem, host_budget_bytes=least + largest)
    found = plan(tight, ladder=()).schedule
    assert found is not None
    validate(found)
    assert keeps_budgets(tight, found)


@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_the_host_budget_that_is_named_has_a_plan(seed: int) -> None:
    problem = random_case(seed)
    least, named = least_host_within_device(problem), planned_host(problem)
    assert least is not None and named is not None
    assert 1.02 * least <= named <= 1.11 * least
    found = plan(replace(problem, host_budget_bytes=named)).schedule
    assert found is not None
    validate(found)


def test_no_host_budget_is_named_where_the_device_is_too_small() -> None:
    problem = random_case(0)
    least = least_budget(problem).bytes
    assert planned_host(replace(problem, device_budget_bytes=int(0.9 * least))) is None


def states_on_host(problem: Problem, decisions: Decisions) -> int:
    """The bytes of whole states that the host reserves for pieces that leave."""
    sizes = {tensor.name: tensor.state_bytes for group in problem.groups for tensor in group.tensors}
    return sum(sizes[tensor.name] for tensor in decisions.tensors if tensor.states)


def test_pieces_that_leave_are_of_few_tensors_if_the_host_is_full() -> None:
    free_bytes, full_bytes = [], []
    for seed in range(8):
        problem = in_rows(random_problem(random.Random(seed), n_blocks=4, tensors=6))
        on_device = tuple(replace(group, side="device") if group.trainable else group for group in problem.groups)
        problem = replace(problem, groups=on_device)
        problem = replace(problem, device_budget_bytes=int(1.05 * least_budget(problem).bytes))
        solution = solve(problem)
        free_bytes.append(states_on_host(problem, round_solution(problem, solution)))
        full_bytes.append(states_on_host(problem, round_solution(problem, solution, host_is_full=True)))
    assert sum(full < free for full, free in zip(full_bytes, free_bytes)) >= 4
    assert sum(full_bytes) < 0.95 * sum(free_bytes)
