"""The program for several micro-batches per update: optima worked out by hand, and plans that keep their word."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offmate.solver.explain import explain
from offmate.solver.files import solution_from_dict
from offmate.solver.files import to_dict as solution_to_dict
from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from offmate.solver.program.streamed import streaming_solution
from offmate.solver.rounding.groups import round_solution
from offmate.solver.schedule import Kind
from offmate.solver.scheduling.emit import build_schedule
from offmate.solver.scheduling.validate import validate
from offmate.solver.simulate import memory_highs, simulate
from offmate.solver.solution import Status
from offmate.solver.solve import least_budget, least_host, solve
from offmate.solver.text import from_dict, to_dict

from ..random_problems import gated, random_problem
from ..test_gate import chain

CLOSE = 1e-3


def batches(m: int, *, add_s: float = 0.0, gate_s: float = 0.0, **chained: object) -> Problem:
    problem = chain(**chained)  # type: ignore[arg-type]
    groups = tuple(replace(group, cpu_add_s=add_s, device_add_s=add_s) for group in problem.groups)
    return replace(problem, groups=groups, micro_batches=m, gate_s=gate_s)


@pytest.mark.parametrize("m", [2, 3, 8])
def test_with_room_for_everything_only_additions_come_on_top(m: int) -> None:
    """6 s of computes per micro-batch, 2 device updates of 1/2 s; from the second on 2 additions of 1/4 s; the norm."""
    problem = batches(m, cpu_s=100.0, device_s=0.5, add_s=0.25, gate_s=0.125, budget=10**6)
    solution = solve(problem, gap=1e-6)
    by_hand_s = 6 * m + 2 * 0.5 + (m - 1) * 2 * 0.25 + 0.125
    assert solution.objective_s == pytest.approx(by_hand_s, rel=CLOSE)
    planned = plan(problem, gap=1e-6)
    assert planned.simulation is not None and planned.schedule is not None
    assert planned.simulation.step_s == pytest.approx(by_hand_s, rel=CLOSE)
    assert planned.simulation.peak_bytes == 2 * 100 + 2 * 200 + 2 * 100 + 100  # p, s, totals, the gradient being made
    assert [a.name for a in planned.schedule.lead[0].backward if a.kind is Kind.BEGIN_TOTAL] == ["w1", "w0"]


def test_eight_are_three_with_the_middle_counted_six_times() -> None:
    three = batches(3, cpu_s=1.0, device_s=0.5, add_s=0.25, budget=700)
    few, many = solve(three, gap=1e-6), solve(replace(three, micro_batches=8), gap=1e-6)
    assert many.groups.keys() == few.groups.keys() and len(many.step_s) == len(few.step_s)
    weighted_s = sum(seconds * three.times(step) for step, seconds in enumerate(few.step_s))
    assert weighted_s == pytest.approx(few.objective_s)
    middle_s = sum(many.step_s[4:8])
    assert many.objective_s == pytest.approx(sum(many.step_s) + 5 * middle_s)
    built = [build_schedule(p, round_solution(p, few)) for p in (three, replace(three, micro_batches=8))]
    assert built[0].actions == built[1].actions
    assert simulate(built[1]).step_s == pytest.approx(simulate(built[0]).step_s + 5 * middle_s, rel=0.2)


def test_totals_take_room_that_one_micro_batch_does_not_need() -> None:
    """p 200, s 400 and the gradients 200 fit into 800; with totals the second backward makes 100 more on top."""
    roomy = {"cpu_s": 100.0, "device_s": 0.5, "budget": 800}
    once, twice = batches(1, **roomy), batches(2, **roomy)
    assert solve(once, gap=1e-6).objective_s == pytest.approx(7.0, rel=CLOSE)
    assert solve(twice, gap=1e-6).objective_s > 13.0 + 0.1
    assert solve(replace(twice, device_budget_bytes=900), gap=1e-6).objective_s == pytest.approx(13.0, rel=CLOSE)


@given(st.integers(0, 10_000), st.sampled_from([2, 3, 4, 7]), st.sampled_from([1.0, 0.02]))
def test_the_host_adds_for_every_micro_batch_but_the_first(seed: int, m: int, speed: float) -> None:
    """Whenever gradients leave: over a slow link, in the next pass. The CPU does nothing but that and the updates."""
    rng = random.Random(seed)
    drawn = gated(random_problem(rng), rng, m)
    rates = replace(drawn.rates, out_bytes_per_s=speed * drawn.rates.out_bytes_per_s, manage_s=0.0, shared_cores=False)
    groups = tuple(replace(g, side="host", cpu_add_s=rng.random()) if g.trainable else g for g in drawn.groups)
    roomy = {"device_budget_bytes": 10**9, "host_budget_bytes": 10**9, "rates": rates}
    problem = replace(drawn, groups=groups, **roomy)
    solution = solve(problem)
    trained = [group for group in problem.groups if group.trainable]
    by_hand_s = problem.gate_s + sum((m - 1) * group.cpu_add_s + group.cpu_update_s for group in trained)
    assert solution.busy_s[rates.worker("accumulate-cpu")] == pytest.approx(by_hand_s, rel=1e-5)


def test_gradients_for_the_host_leave_in_every_pass() -> None:
    """No room for states: both weights are updated on the host, and computes hide nearly everything.

    After the last backward w0's gradient goes out (0.1 s) and is added (0.1 s); behind the gate it is updated (0.2 s)
    and comes back (0.1 s). w1 is updated after it, under the first forward.
    """
    problem = batches(3, cpu_s=0.2, device_s=0.1, add_s=0.1, budget=300)
    planned = plan(problem, gap=1e-6)
    assert planned.schedule is not None and planned.simulation is not None
    assert planned.schedule.update_cpu_s == pytest.approx({"w0": 0.2, "w1": 0.2})
    sent = [action.name for action in planned.schedule.actions if action.kind is Kind.OFFLOAD]
    assert sorted(sent) == ["g:w0"] * 3 + ["g:w1"] * 3
    assert planned.simulation.peak_bytes <= 300
    assert planned.simulation.step_s == pytest.approx(18.5, rel=CLOSE)
    assert planned.solution.objective_s == pytest.approx(18.6, rel=CLOSE)  # whose steps hide w1's update only in part
    # Parameters, totals and states of both, and two buffers in which gradients arrive.
    assert planned.schedule.host_bytes == planned.solution.host_bytes == 2 * (100 + 100 + 200) + 2 * 100
    assert least_host(problem) == 512  # all on the device: the host has the buffers and the parameters


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 5]), st.floats(0.0, 1.0))
def test_plans_keep_both_budgets(seed: int, m: int, roomy: float) -> None:
    rng = random.Random(seed)
    free = random_problem(rng, n_blocks=rng.choice([2, 3]), tensors=rng.randint(1, 3), tied=rng.random() < 0.4)
    problem = gated(free, rng, m)
    least, ample = least_budget(problem).bytes, solve(problem)
    assert ample.status is Status.OPTIMAL
    budget = int(least * 1.02 + roomy * max(0, max(ample.memory_bytes) - least))
    tight = replace(problem, device_budget_bytes=budget)
    solution = solve(tight)
    schedule = build_schedule(tight, round_solution(tight, solution))
    validate(schedule)
    most = [0] * tight.n_steps
    for action, high in zip(schedule.actions, memory_highs(schedule)):
        if action.name not in ("start", "user"):
            most[action.step] = max(most[action.step], high)
    assert all(whole <= fractional + 1 for whole, fractional in zip(most, solution.memory_bytes))
    planned = plan(replace(tight, host_budget_bytes=int(solution.host_bytes * 1.2)))
    if planned.schedule is not None and planned.simulation is not None:
        validate(planned.schedule)
        assert planned.simulation.peak_bytes <= budget
        assert planned.schedule.host_bytes <= solution.host_bytes * 1.2
        assert 0 < planned.simulation.step_s < float("inf")
        assert from_dict(to_dict(planned.schedule)) == planned.schedule
        assert solution_from_dict(solution_to_dict(planned.solution)) == planned.solution


@pytest.mark.parametrize("m", [2, 3, 6])
@pytest.mark.parametrize("seed", range(4))
def test_the_safe_plan_is_valid_and_explained(seed: int, m: int) -> None:
    rng = random.Random(seed)
    problem = gated(random_problem(rng, tied=seed % 2 == 0), rng, m)
    schedule = build_schedule(problem, round_solution(problem, streaming_solution(problem)))
    validate(schedule)
    planned = plan(problem, time_limit_s=0.0)
    assert planned.solution.status is Status.STREAMED
    explanation = explain(problem, planned, offers=False)
    assert len(explanation.phases) == 2 * min(m, 3) + 1
    assert explanation.phases[0].name == "first forward"
    assert "The last backward takes" in explanation.text()


@pytest.mark.parametrize("m", [2, 4])
def test_backends_agree(m: int) -> None:
    rng = random.Random(m)
    problem = gated(random_problem(rng, n_blocks=2, tied=True), rng, m)
    tight = replace(problem, device_budget_bytes=int(1.3 * least_budget(problem).bytes))
    one, two = (solve(tight, gap=1e-6, backend=name) for name in ("highs", "cbc"))
    assert one.objective_s == pytest.approx(two.objective_s, rel=CLOSE)
