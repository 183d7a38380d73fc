"""Whole tensors: never above the fractions' memory, always a valid schedule; small cases by hand."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from offmate.solver.decisions import ActivationStay, StateStay, TensorGap, tensor_bytes
from offmate.solver.plan import plan
from offmate.solver.polish.improve import improve
from offmate.solver.problem import Block, Group, Option, Problem, Rates, TensorSize
from offmate.solver.rounding.activations import whole_activations
from offmate.solver.rounding.groups import round_solution
from offmate.solver.scheduling.emit import build_schedule
from offmate.solver.scheduling.validate import validate
from offmate.solver.simulate import memory_highs, simulate
from offmate.solver.solution import ActivationFlow, Gap, GroupFlow, Solution, Status
from offmate.solver.solve import least_budget, solve

from ..random_problems import in_rows, random_problem


def one_group(group, **changes):
    """Two blocks without activations to speak of, and one group."""
    blocks = tuple(Block(f"b{i}", (Option("keep", 0, 0, 1.0, 1.0, 1, 1000),)) for i in range(2))
    fields = {"device_budget_bytes": 10_000, "host_budget_bytes": 10_000} | changes
    return Problem(blocks, (group,), (), (), (), Rates(100.0, 100.0, 200.0), **fields)


def trainable(*sizes):
    tensors = tuple(TensorSize(f"w{i}", size, size, 2 * size) for i, size in enumerate(sizes))
    return Group("w", tensors, (1, 2), (2,), cpu_update_s=1.0, device_update_s=0.1)


def solution(**flow):
    flows = {"w": GroupFlow(**flow)}
    return Solution(Status.OPTIMAL, 4.0, 4.0, 0.0, 0.0, (0, 0), (ActivationFlow(),) * 2, groups=flows)


def by_name(decisions):
    return {plan.name: plan for plan in decisions.tensors}


def test_the_host_part_is_rounded_up_and_its_chain_fits():
    problem = one_group(trainable(100, 60, 40))
    flow = {"cpu_part": 0.25, "grad_out": {2: 0.25}, "cpu_update": {4: 0.25}, "cpu_back": {0: 0.25}}
    plans = by_name(round_solution(problem, solution(**flow)))
    assert [name for name, p in plans.items() if p.cpu] == ["w1"]
    assert (plans["w1"].grad_out, plans["w1"].cpu_update, plans["w1"].back) == (2, 4, 0)
    assert not plans["w0"].has_copy


def test_a_late_gradient_still_leaves_time_for_its_update():
    # The fractions' last bit goes out in step 5, which leaves a whole tensor no time for its way back before step 1.
    problem = one_group(trainable(100), turn_around_steps=2)
    flow = {"cpu_part": 1.0, "grad_out": {3: 1.0}, "cpu_update": {4: 1.0}, "cpu_back": {0: 0.9, 5: 0.1}}
    w = by_name(round_solution(problem, solution(**flow)))["w0"]
    order = [(step - 2) % problem.n_steps for step in (w.grad_out, w.cpu_update, w.back, 0)]
    assert order[0] < order[1] < order[2] <= order[3]


def test_device_tensors_leave_and_return_in_whole():
    problem = one_group(trainable(100, 60, 40))
    flow = {"out": {3: 0.5}, "drop": {3: 0.5}, "back": {6: 0.1, 0: 0.4}}
    plans = by_name(round_solution(problem, solution(**flow)))
    assert (plans["w0"].out, plans["w0"].drop, plans["w0"].back) == (3, 3, 0)
    assert (plans["w1"].out, plans["w1"].drop, plans["w1"].back) == (None, None, None)


def test_states_are_rounded_on_their_own():
    problem = one_group(trainable(100, 60, 40))
    plans = by_name(round_solution(problem, solution(state_out={2: 0.3}, state_in={1: 0.3})))
    assert {name: p.states for name, p in plans.items()} == {"w0": (), "w1": (StateStay((0, 1), 2, 1),), "w2": ()}


def test_a_frozen_group_drops_the_same_tensors_in_every_gap():
    tensors = tuple(TensorSize(f"w{i}", size) for i, size in enumerate((100, 60, 40)))
    problem = one_group(Group("w", tensors, (0, 3)))
    gaps = (Gap(0, 3, 0.3, {2: 0.3}), Gap(3, 0, 0.2, {6: 0.2}))
    plans = by_name(round_solution(problem, solution(gaps=gaps)))
    assert plans["w1"].gaps == (TensorGap(0, 3, 2), TensorGap(3, 0, 6))
    assert [name for name, p in plans.items() if p.has_copy] == ["w1"]


def test_an_external_update_takes_every_tensor():
    group = replace(trainable(100, 60), tensors=(TensorSize("w0", 100, 100), TensorSize("w1", 60, 60)))
    problem = one_group(group, update="external")
    flow = {"cpu_part": 1.0, "grad_out": {2: 0.5, 4: 0.5}, "cpu_back": {6: 1.0}}
    decisions = round_solution(problem, solution(**flow))
    assert all(p.cpu and p.cpu_update is None and p.back == 6 for p in decisions.tensors)
    schedule = build_schedule(problem, decisions)
    validate(schedule)
    assert [str(a) for a in schedule.forward[:2]] == ["6 prefetch p:w0", "6 prefetch p:w1"]
    assert not schedule.resident


def test_a_solution_without_a_plan_is_refused():
    problem = one_group(trainable(100))
    with pytest.raises(ValueError, match="no plan fits the budgets"):
        round_solution(problem, Solution(Status.INFEASIBLE, 0.0, 0.0, 0.0, 0.0))


problems = st.builds(
    lambda seed, blocks, tensors, update, tied, cut: (in_rows if cut else lambda whole: whole)(
        random_problem(random.Random(seed), n_blocks=blocks, tensors=tensors, update=update, tied=tied)
    ),
    st.integers(0, 10**6),
    st.integers(2, 4),
    st.integers(1, 4),
    st.sampled_from(["planned", "external"]),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(problems, st.floats(0.0, 1.0))
def test_rounding_needs_no_more_than_the_fractions(problem, room):
    least, ample = least_budget(problem).bytes, max(solve(problem).memory_bytes)
    problem = replace(problem, device_budget_bytes=int(least + room * max(0, ample - least)))
    answer = solve(problem)
    assert answer.options
    decisions = round_solution(problem, answer)
    schedule = build_schedule(problem, decisions)
    validate(schedule)
    most = [0] * problem.n_steps
    for action, high in zip(schedule.actions, memory_highs(schedule)):
        if action.name not in ("start", "user"):
            most[action.step] = max(most[action.step], high)
    assert all(whole <= fractional + 1 for whole, fractional in zip(most, answer.memory_bytes))
    improved = improve(schedule)
    validate(improved)
    rounded_s, improved_s = simulate(schedule).step_s, simulate(improved).step_s
    assert improved_s <= rounded_s * (1 + 1e-9)
    note(f"fractions {answer.objective_s:.4f} s, rounded {rounded_s:.4f} s, improved {improved_s:.4f} s")


@settings(max_examples=10, deadline=None)
@given(problems, st.floats(0.0, 1.0))
def test_a_tight_host_gets_a_valid_schedule_or_none(problem, room):
    answer = solve(problem)
    budget = int(answer.host_bytes * (0.5 + room))
    planned = plan(replace(problem, host_budget_bytes=budget))
    if planned.schedule is not None:
        validate(planned.schedule)
        assert planned.schedule.host_bytes <= budget


def test_the_bytes_of_a_tensor_follow_its_plan():
    group = trainable(100)
    problem = one_group(group)
    flow = {"cpu_part": 1.0, "grad_out": {3: 1.0}, "cpu_update": {4: 1.0}, "cpu_back": {0: 1.0}}
    (plan_of_w,) = round_solution(problem, solution(**flow)).tensors
    # Steps 0 (back in) to 6; its gradient is pending in step 3, its parameter away in steps 3 to 6.
    assert tensor_bytes(problem, group, group.tensors[0], plan_of_w) == [100, 100, 100, 100, 0, 0, 0]


def test_the_same_problem_gives_the_same_schedule():
    problem = replace(random_problem(random.Random(3)), device_budget_bytes=20_000)
    assert plan(problem).schedule == plan(problem).schedule


def test_nothing_fits_is_a_status():
    problem = replace(random_problem(random.Random(3)), device_budget_bytes=10)
    planned = plan(problem)
    assert planned.schedule is None
    assert planned.solution.status is Status.INFEASIBLE


def offloading(*flows):
    """Eight blocks of which the first ones offload 100 bytes in such a way, and what rounding makes of it."""
    ways = (Option("keep", 0, 0, 1.0, 1.0, 1, 1), Option("offload", 0, 100, 1.0, 1.0, 1, 1))
    blocks = tuple(Block(f"b{i}", ways) for i in range(8))
    problem = Problem(blocks, (), (), (), (), Rates(100.0, 100.0, 200.0), 10_000, 10_000)
    more = 8 - len(flows)
    answer = Solution(Status.OPTIMAL, 16.0, 16.0, 0.0, 0.0, (1,) * len(flows) + (0,) * more)
    return whole_activations(problem, replace(answer, activations=flows + (ActivationFlow(),) * more))


def test_an_offload_leaves_as_late_and_returns_as_early_as_its_fractions_allow():
    stays, spare = offloading(ActivationFlow({0: 0.3, 1: 0.7}, {13: 0.4, 15: 0.6}), ActivationFlow({2: 1.0}, {13: 1.0}))
    # of the first one 30 B are gone in step 1, and 60 B still absent in steps 13 and 14
    assert stays == (ActivationStay(0, 15), ActivationStay(2, 13), *(None,) * 6)
    assert [(step, round(size)) for step, size in enumerate(spare) if size > 0.1] == [(1, 70), (13, 40), (14, 40)]


def test_an_offload_uses_what_another_one_spares():
    stays, spare = offloading(
        ActivationFlow({0: 0.1, 2: 0.9}, {15: 1.0}), ActivationFlow({1: 0.8, 2: 0.2}, {13: 0.2, 14: 0.8})
    )
    # in step 2 the first one spares 90 B, so that the second one, of which 80 B are gone, may stay
    assert stays[:2] == (ActivationStay(0, 15), ActivationStay(2, 14))
    assert all(size >= -0.1 for size in spare)
