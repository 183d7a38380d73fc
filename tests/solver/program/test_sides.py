"""Groups that the host alone, or the device alone, updates: the program, the rounding and the plans keep to it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offmate.solver.explain import explain
from offmate.solver.files import problem_from_dict, to_dict
from offmate.solver.plan import Planned, plan
from offmate.solver.problem import Problem, ProblemError
from offmate.solver.program.streamed import streaming_solution
from offmate.solver.rounding.groups import round_solution
from offmate.solver.rounding.settle import Resolver, settle, settle_whole
from offmate.solver.schedule import Schedule
from offmate.solver.scheduling.emit import build_schedule
from offmate.solver.scheduling.validate import validate
from offmate.solver.simulate import memory_highs
from offmate.solver.solve import least_budget, least_host, solve

from ..random_problems import gated, in_rows, random_problem
from ..test_brute_force import check_no_whole_plan_is_better

SIDES = ("any", "host", "device")


def sided(problem: Problem, *sides: str) -> Problem:
    """The problem with these sides for its groups, one after the other, again and again."""
    groups = (replace(group, side=sides[i % len(sides)]) for i, group in enumerate(problem.groups))
    return replace(problem, groups=tuple(groups))


def mixed(seed: int, **how: int) -> Problem:
    """A random problem whose groups have sides at random."""
    rng = random.Random(seed)
    micro_batches = how.pop("micro_batches", 0)
    problem = random_problem(rng, tied=seed % 2 == 0, **how)  # type: ignore[arg-type]
    problem = gated(problem, rng, micro_batches) if micro_batches else problem
    return sided(problem, *(rng.choice(SIDES) for _ in problem.groups))


def check_sides(problem: Problem, schedule: Schedule) -> None:
    for group in problem.groups:
        names = {tensor.name for tensor in group.tensors} if group.trainable else set()
        if group.side == "host":
            assert names <= schedule.update_cpu_s.keys() and not names & schedule.update_device_s.keys()
        elif group.side == "device":
            assert names <= schedule.update_device_s.keys() and not names & schedule.update_cpu_s.keys()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("m", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_no_whole_plan_with_these_sides_is_better(seed: int, m: int) -> None:
    problem = mixed(seed, n_blocks=2, tensors=1, micro_batches=m)
    check_no_whole_plan_is_better(problem, random.Random(seed))


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("backend", ["highs", "cbc"])
def test_nor_with_one_side_for_all(backend: str, side: str) -> None:
    problem = sided(random_problem(random.Random(3), n_blocks=2, tensors=1), side)
    check_no_whole_plan_is_better(problem, random.Random(3), backend)


def test_the_program_keeps_to_the_side() -> None:
    problem = mixed(7, n_blocks=4, tensors=3)
    solution = solve(problem)
    for group in problem.groups:
        if group.trainable and group.side != "any":
            assert solution.groups[group.name].cpu_part == (group.side == "host")


def test_a_side_costs_budget_and_never_gains_any() -> None:
    """On the device states have to come, on the host gradients have to arrive."""
    problem = random_problem(random.Random(5), n_blocks=3, tensors=2)
    least = {side: least_budget(sided(problem, side)).bytes for side in SIDES}
    host = {side: least_host(sided(problem, side)) for side in SIDES}
    assert least["any"] <= least["host"] < least["device"]
    assert host["any"] <= min(host["host"], host["device"])
    for side in SIDES:
        within = replace(sided(problem, side), device_budget_bytes=least[side])
        assert solve(within).options
        assert not solve(replace(within, device_budget_bytes=int(least[side] * 0.98) - 512)).options


@given(
    st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 4), st.sampled_from([0, 1, 2, 3]), st.booleans(),
    st.floats(0.0, 1.0),
)  # fmt: skip
def test_plans_keep_to_the_sides_and_to_the_budgets(
    seed: int, blocks: int, tensors: int, m: int, cut: bool, room: float
) -> None:
    problem = mixed(seed, n_blocks=blocks, tensors=tensors, micro_batches=m)
    problem = in_rows(problem) if cut else problem
    least, ample = least_budget(problem).bytes, max(solve(problem).memory_bytes)
    problem = replace(problem, device_budget_bytes=int(least * 1.05 + room * max(0, ample - least)))
    planned = plan(problem)
    if planned.schedule is not None:
        check(problem, planned)


def check(problem: Problem, planned: Planned) -> None:
    assert planned.schedule is not None
    validate(planned.schedule)
    check_sides(problem, planned.schedule)
    assert max(memory_highs(planned.schedule)) <= problem.device_budget_bytes
    assert explain(problem, planned, offers=False).phases


@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 3), st.sampled_from([0, 1, 2, 3]))
def test_the_safe_plan_keeps_to_them_too(seed: int, blocks: int, tensors: int, m: int) -> None:
    problem = mixed(seed, n_blocks=blocks, tensors=tensors, micro_batches=m)
    schedule = build_schedule(problem, round_solution(problem, streaming_solution(problem)))
    validate(schedule)
    check_sides(problem, schedule)


@given(st.integers(0, 10**6), st.sampled_from([0, 2]), st.floats(0.0, 1.0))
def test_nearer_to_whole_tensors_they_are_kept(seed: int, m: int, room: float) -> None:
    problem = mixed(seed, tensors=3, micro_batches=m)
    least, ample = least_budget(problem).bytes, max(solve(problem).memory_bytes)
    problem = replace(problem, device_budget_bytes=int(least * 1.05 + room * max(0, ample - least)))
    solution = solve(problem)
    for near in (*settle(Resolver(problem, solution)), settle_whole(problem, solution)):
        if near is not None:
            check_sides(problem, build_schedule(problem, round_solution(problem, near)))


def test_sides_survive_files_and_old_files_have_none() -> None:
    problem = mixed(1)
    assert problem_from_dict(to_dict(problem)) == problem
    data = to_dict(problem)
    for group in data["groups"]:
        del group["side"]
    assert problem_from_dict(data) == sided(problem, "any")


def test_another_side_is_refused() -> None:
    wrong: Literal["any"] = "left"  # type: ignore[assignment]
    with pytest.raises(ProblemError, match="side is 'left'"):
        sided(random_problem(random.Random(0)), wrong)
