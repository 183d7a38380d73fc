"""With a gate no update starts before the last backward has ended."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offmate.solver.plan import plan
from offmate.solver.problem import Block, Group, Option, Problem, ProblemError, Rates, TensorSize, update_steps
from offmate.solver.program.streamed import streaming_solution
from offmate.solver.rounding.groups import round_solution
from offmate.solver.schedule import Kind
from offmate.solver.scheduling.emit import build_schedule
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import simulate
from offmate.solver.solution import Status
from offmate.solver.solve import least_budget, solve
from offmate.solver.text import from_dict, to_dict

from .random_problems import random_problem


def chain(*, cpu_s: float, device_s: float, budget: int, n: int = 2) -> Problem:
    """Blocks of a second per forward and two per backward, 100 bytes of parameters each, states of 200."""
    option = Option("keep", 0, 0, 1.0, 2.0, 0, 100)
    groups = tuple(
        Group(f"g{i}", (TensorSize(f"w{i}", 100, 100, 200),), (i, 2 * n - 1 - i), (2 * n - 1 - i,), cpu_s, device_s)
        for i in range(n)
    )
    blocks = tuple(Block(f"b{i}", (option,)) for i in range(n))
    return Problem(blocks, groups, (), (), (), Rates(1e3, 1e3, 1e3), budget, 10**6, gate=True)


def test_device_updates_follow_the_last_backward() -> None:
    """Everything fits: 6 s of computes, then two device updates of half a second that nothing can hide."""
    problem = chain(cpu_s=100.0, device_s=0.5, budget=10**6)
    solution = solve(problem, gap=1e-6)
    assert solution.objective_s == pytest.approx(7.0, rel=1e-3)
    assert solution.step_s[3] == pytest.approx(2.0, rel=1e-3)
    assert solve(replace(problem, gate=False), gap=1e-6).objective_s == pytest.approx(7.0, rel=3e-3)


def test_host_updates_wait_and_run_into_the_next_forward() -> None:
    """No backward hides a host update, but the first forward hides w2's, which comes back in the second.

    Those of w0 and w1 have to be done in the turn-around.
    """
    problem = chain(cpu_s=0.9, device_s=100.0, budget=10**6, n=3)
    planned = plan(problem, gap=1e-6)
    assert planned.schedule is not None
    assert planned.solution.groups["g2"].cpu_update == {0: pytest.approx(1.0)}
    assert planned.solution.objective_s == pytest.approx(9.0 + 1.8, rel=1e-2)


def test_a_budget_without_room_for_gradients_updates_on_the_host() -> None:
    """All on the device takes 800 bytes when the last backward ends; what does not fit goes to the host."""
    problem = chain(cpu_s=1.0, device_s=0.1, budget=500)
    solution = solve(problem)
    assert solution.status is Status.OPTIMAL
    assert sum(flow.cpu_part for flow in solution.groups.values()) > 0.1
    assert max(solution.memory_bytes) <= 500


def slow_host(budget: int) -> Problem:
    """Four blocks whose host updates take too long, and states that take up little."""
    problem = chain(cpu_s=100.0, device_s=0.1, budget=budget, n=4)
    groups = (replace(g, tensors=(replace(g.tensors[0], state_bytes=40),)) for g in problem.groups)
    return replace(problem, groups=tuple(groups), turn_around_steps=6)


def test_gradients_leave_and_return_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes take 12 s and updates on the device 0.4 s, but one on the host takes 100 s."""
    roomy, tight = slow_host(1100), slow_host(700)
    assert not any(flow.wait_out for flow in solve(roomy, gap=1e-6).groups.values())
    planned = plan(tight, gap=1e-6)
    assert planned.schedule is not None and planned.simulation is not None
    assert planned.solution.objective_s == pytest.approx(12.66, abs=0.01)
    assert planned.simulation.step_s < 13.2 and planned.simulation.peak_bytes <= 700
    waited = {a.item.name for a in planned.schedule.turn_around if a.kind is Kind.PREFETCH and a.name.startswith("g:")}
    assert waited and waited <= planned.schedule.update_device_s.keys()
    for flow in planned.solution.groups.values():
        assert all(step >= tight.first_turn_around for step in flow.wait_in), "not before the gate is open"
        assert sum(flow.wait_in.values()) == pytest.approx(sum(flow.wait_out.values()), abs=1e-6)
    monkeypatch.setattr(Problem, "waiting", lambda problem, group: ((), ()))
    assert solve(tight, gap=1e-6).objective_s == pytest.approx(85.0, abs=0.1), "if all had to stay"


def test_a_gradient_that_returns_before_the_gate_is_refused() -> None:
    schedule = plan(slow_host(700)).schedule
    assert schedule is not None
    back = next(a for a in schedule.turn_around if a.kind is Kind.PREFETCH and a.name.startswith("g:"))
    rest = tuple(a for a in schedule.turn_around if a is not back)
    early = replace(schedule, turn_around=(back, *rest), device_budget_bytes=10**6)
    with pytest.raises(ScheduleError, match="before the gate, which scales it, is open"):
        validate(early)
    without = replace(schedule, turn_around=rest)
    with pytest.raises(ScheduleError, match="not on the device"):
        validate(without)


@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_plans_keep_the_gate_and_the_budget(seed: int, roomy: float) -> None:
    rng = random.Random(seed)
    free = random_problem(rng, n_blocks=rng.choice([2, 3, 4]), tied=rng.random() < 0.4)
    problem = replace(free, gate=True, turn_around_steps=rng.choice([3, 4, 6, 8]))
    least = least_budget(problem).bytes
    ample = solve(problem)
    assert ample.status is Status.OPTIMAL
    budget = int(least * 1.1 + roomy * max(0, max(ample.memory_bytes) - least))
    tight = replace(problem, device_budget_bytes=budget)
    solution = solve(tight)
    schedule = build_schedule(tight, round_solution(tight, solution))
    validate(schedule)
    planned = plan(tight)
    assert planned.schedule is not None and planned.simulation is not None
    assert planned.simulation.peak_bytes <= budget
    assert from_dict(to_dict(planned.schedule)) == planned.schedule


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_the_safe_plan_is_valid(seed: int, gate: bool) -> None:
    problem = replace(random_problem(random.Random(seed)), gate=gate, turn_around_steps=3)
    schedule = build_schedule(problem, round_solution(problem, streaming_solution(problem)))
    validate(schedule)
    assert simulate(schedule).step_s > 0


def test_no_time_gives_the_safe_plan() -> None:
    planned = plan(random_problem(random.Random(3)), time_limit_s=0.0)
    assert planned.solution.status is Status.STREAMED
    assert planned.schedule is not None


def test_refusals() -> None:
    problem = chain(cpu_s=1.0, device_s=1.0, budget=10**6)
    with pytest.raises(ProblemError, match="at least 3"):
        replace(problem, turn_around_steps=2)
    with pytest.raises(ProblemError, match="planned updates"):
        replace(problem, update="external")
    planned = plan(replace(problem, gate=False))
    assert planned.schedule is not None
    assert any(action.kind is Kind.UPDATE_DEVICE for action in planned.schedule.backward)
    with pytest.raises(ScheduleError, match="before the last backward"):
        validate(replace(planned.schedule, gate=True))


def sized(*state_bytes: int) -> tuple[Group, ...]:
    """Groups with states of these bytes, the first with its last gradient latest."""
    n = len(state_bytes)
    return tuple(
        Group(f"g{i}", (TensorSize(f"w{i}", 10, 10, size),), (i, 2 * n - 1 - i), (2 * n - 1 - i,))
        for i, size in enumerate(state_bytes)
    )


def test_an_update_phase_has_as_many_steps_as_its_states_need() -> None:
    """A step's states take a sixth of the budget; two steps more let the last ones leave and come back."""
    assert update_steps(sized(600, 600, 600), 1000) == 2 + 3, "no more than one for each group"
    assert update_steps(sized(*[100] * 20), 1000) == 2 + 12
    assert update_steps(sized(*[100] * 20), 12_000) == 2 + 1
    assert update_steps(sized(0, 0), 1000) == update_steps((), 1000) == 3


def test_the_steps_of_an_update_phase_have_about_the_same_bytes() -> None:
    groups = sized(100, 10, 10, 10, 10, 10, 50, 100)
    problem = replace(chain(cpu_s=1.0, device_s=1.0, budget=10**6, n=8), groups=groups, turn_around_steps=5)
    first = problem.first_turn_around
    found = [problem.device_update(group) - first for group in groups]
    assert found == [2, 2, 1, 1, 1, 1, 1, 0], "the last blocks' gradients are complete first"
