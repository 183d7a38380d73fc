"""Whole host parts near the fractions, and what planning makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offmate.solver import refinements
from offmate.solver.plan import plan
from offmate.solver.problem import Group, TensorSize
from offmate.solver.refine import Limits, Search
from offmate.solver.refinements import Settle
from offmate.solver.rounding.settle import Parts, Resolver, settle, whole_parts, whole_states
from offmate.solver.scheduling.validate import validate
from offmate.solver.simulate import simulate
from offmate.solver.solution import GroupFlow, Solution, Status
from offmate.solver.solve import least_budget, solve

from ..random_problems import random_problem
from ..test_gate import chain


def test_excesses_of_groups_even_out() -> None:
    """Three groups of four equal tensors: 0.3 each is 1.2 tensors, then 1.2 - 0.2 more, then 1.2 + 0.4: 1, 1, 2."""
    problem = chain(cpu_s=1.0, device_s=1.0, budget=10**6, n=3)
    groups = tuple(
        replace(group, tensors=tuple(TensorSize(f"{group.name}.{k}", 25, 25, 50) for k in range(4)))
        for group in problem.groups
    )
    flows = {group.name: GroupFlow(cpu_part=0.3) for group in groups}
    solution = Solution(Status.OPTIMAL, 1.0, 1.0, 0.0, 0.0, (0, 0, 0), (False,) * 3, groups=flows)
    assert whole_parts(replace(problem, groups=groups), solution) == {"g2": 0.25, "g1": 0.25, "g0": 0.5}


def test_states_that_leave_are_never_less_than_the_fractions() -> None:
    """Three groups of four tensors with states of 50, one tensor each on the host: 0.2 of each is 120, so 150."""
    problem = chain(cpu_s=1.0, device_s=1.0, budget=10**6, n=3)
    groups = tuple(
        replace(group, tensors=tuple(TensorSize(f"{group.name}.{k}", 25, 25, 50) for k in range(4)))
        for group in problem.groups
    )
    flows = {group.name: GroupFlow(cpu_part=0.25, state_out={8: 0.2}) for group in groups}
    settled = Solution(Status.OPTIMAL, 1.0, 1.0, 0.0, 0.0, (0, 0, 0), (False,) * 3, groups=flows)
    assert sum(whole_states(replace(problem, groups=groups), settled).values()) * 200 == 150


def test_a_large_group_is_tried_both_ways() -> None:
    """Rounded alone, a state that takes half an iteration to move would move for the sake of a few bytes."""
    group = Group("w", (TensorSize("w", 100, 100, 3000),), (0, 3), (3,), cpu_update_s=0.5, device_update_s=0.1)
    problem = replace(chain(cpu_s=0.5, device_s=0.1, budget=3190), groups=(group,), gate=False)
    solution = solve(problem, gap=1e-6)
    assert 0 < solution.groups["w"].cpu_part < 0.1
    (settled, *_) = settle(Resolver(problem, solution))
    assert settled.groups["w"].cpu_part == pytest.approx(1.0)
    planned = plan(problem)
    assert planned.simulation is not None and planned.schedule is not None
    assert planned.schedule.update_cpu_s == {"w": 0.5}
    assert planned.simulation.step_s == pytest.approx(6 + 0.1 + 0.5 + 0.1, rel=0.05)


def test_a_trace_on_the_host_is_not_worth_a_whole_tensor() -> None:
    """The next forward hides a thousandth of a host update; the whole of one would take 100 s."""
    problem = chain(cpu_s=100.0, device_s=0.5, budget=10**6)
    solution = solve(problem)
    assert 0 < sum(flow.cpu_part for flow in solution.groups.values()) < 0.1
    planned = plan(problem)
    assert planned.schedule is not None and planned.simulation is not None
    assert not planned.schedule.update_cpu_s
    assert planned.simulation.step_s == pytest.approx(7.0)


def test_what_does_not_fit_in_whole_parts_is_left() -> None:
    """Parameter, gradient and state take 400; nearest to 0.4 on the host is nothing, and that does not fit into 320."""
    group = Group("w", (TensorSize("w", 100, 100, 200),), (0, 3), (3,), cpu_update_s=1.0, device_update_s=0.1)
    problem = replace(chain(cpu_s=1.0, device_s=0.1, budget=320), groups=(group,), gate=False)
    solution = replace(solve(problem), groups={"w": GroupFlow(cpu_part=0.4)})
    assert whole_parts(problem, solution) == {"w": 0.0}
    assert Resolver(problem, solution).solve(Parts({"w": 0.0})) is None
    assert Resolver(replace(problem, device_budget_bytes=400), solution).solve(Parts({"w": 0.0})) is not None
    # It is large: so all of it on the host is tried, too.
    assert next(settle(Resolver(problem, solution))).groups["w"].cpu_part == pytest.approx(1.0)


def test_the_same_parts_are_solved_once() -> None:
    problem = random_problem(random.Random(2))
    problem = replace(problem, device_budget_bytes=int(1.5 * least_budget(problem).bytes))
    resolver = Resolver(problem, solve(problem))
    first, second = (list(settle(resolver)) for _ in range(2))
    assert first and len(first) == len(second)
    assert all(one is other for one, other in zip(first, second))


@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_settled_plans_are_valid_and_not_slower(seed: int, roomy: float) -> None:
    problem = random_problem(random.Random(seed), tensors=3)
    least, ample = least_budget(problem).bytes, max(solve(problem).memory_bytes)
    problem = replace(problem, device_budget_bytes=int(least * 1.02 + roomy * max(0, ample - least)))
    solution = solve(problem)
    for settled in settle(Resolver(problem, solution)):
        assert max(settled.memory_bytes) <= problem.device_budget_bytes
        assert settled.objective_s >= solution.lower_bound_s - 1e-9
    planned = plan(problem)
    assert planned.schedule is not None and planned.simulation is not None
    validate(planned.schedule)
    assert simulate(planned.schedule).step_s == planned.simulation.step_s
    assert planned.rounding_loss_s == pytest.approx(planned.simulation.step_s - planned.solution.objective_s)


def test_where_no_whole_parts_fit_those_of_a_smaller_budget_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(random.Random(2))
    problem = replace(problem, device_budget_bytes=int(1.5 * least_budget(problem).bytes))
    solution, asked = solve(problem), []

    def settled(resolver: Resolver, near: Solution, *, host_is_full: bool) -> Iterator[Solution]:
        asked.append(near)
        return iter((resolver.solution,) if near is not resolver.solution else ())

    monkeypatch.setattr(refinements, "settle", settled)
    monkeypatch.setattr(refinements, "_rounded", lambda *given: iter(("found",)))
    search = Search(problem, problem, solution, Limits(), ())
    assert list(Settle().candidates(search)) == ["found"]  # type: ignore[comparison-overlap]
    assert asked[0] is solution and len(asked) == 2
    assert asked[1].objective_s >= solution.objective_s * (1 - 0.01), "with less memory nothing is faster"
