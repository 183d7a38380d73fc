"""A copy takes seconds of its own beside those of its bytes: program, schedule and simulator charge them."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from offmate.solver.plan import plan
from offmate.solver.problem import Block, Group, Option, Problem, Rates, TensorSize
from offmate.solver.resources import Path, Resource, Tier
from offmate.solver.simulate import simulate
from offmate.solver.solution import Solution, Status
from offmate.solver.solve import solve
from offmate.solver.text import from_dict, to_dict

from .random_problems import gated, in_rows, random_problem
from .tiny_schedule import tiny_schedule

PER_COPY_S = 2e-3


def problem_of(seed: int) -> Problem:
    """A random problem that has to move something, on a machine whose copies take as long as their bytes."""
    rng = random.Random(seed)
    problem = in_rows(random_problem(rng, n_blocks=3, tensors=2))
    problem = gated(problem, rng, seed % 4) if seed % 4 else problem
    ample = plan(problem)
    assert ample.simulation is not None
    rates = replace(problem.rates, per_copy_s=PER_COPY_S)
    return replace(problem, rates=rates, device_budget_bytes=int(0.7 * ample.simulation.peak_bytes))


def copies_s(problem: Problem, solution: Solution) -> dict[Resource, dict[int, float]]:
    """Seconds of each link by step that a solution's flows of parameter groups take, counted tensor by tensor."""
    found: dict[Resource, dict[int, float]] = {link: defaultdict(float) for link in problem.rates.links}
    into, out = problem.rates.host.links
    for group in problem.groups:
        flow = solution.groups[group.name]
        params = [t.param_bytes for t in group.tensors]
        grads = [t.grad_bytes for t in group.tensors]
        states = [t.piece_bytes(rows) for t in group.tensors for rows in t.pieces]
        moves = [(out, grads, flow.grad_out), (out, params, flow.out), (out, states, flow.state_out)]
        moves += [(out, grads, flow.wait_out), (into, grads, flow.wait_in), (into, states, flow.state_in)]
        moves += [(into, params, flow.cpu_back), (into, params, flow.back)]
        moves += [(out, grads, {s + start: f for s, f in flow.lead_out.items()}) for start in problem.passes[:-1]]
        moves += [(into, params, {s + b: f for s, f in gap.back.items()}) for gap in flow.gaps for b in gap.shifts]
        for link, sizes, fractions in moves:
            whole_s = sum(size / problem.rates.bytes_per_s(link) + PER_COPY_S for size in sizes)
            for step, fraction in fractions.items():
                found[link][step] += fraction * whole_s
    return found


@pytest.mark.parametrize("seed", range(8))
def test_every_step_of_the_program_has_room_for_its_copies(seed: int) -> None:
    problem = problem_of(seed)
    solution = solve(problem)
    if solution.status is Status.INFEASIBLE:
        assert solve(replace(problem, rates=replace(problem.rates, per_copy_s=0.0))).status is Status.INFEASIBLE
        return
    moving = copies_s(problem, solution)
    assert sum(sum(steps.values()) for steps in moving.values()) > PER_COPY_S
    for link, steps in moving.items():
        for step, seconds in steps.items():
            assert solution.step_s[step] >= seconds * (1 - 1e-6), (link, step)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
def test_a_schedule_takes_them_too_and_is_no_faster_than_the_bound(seed: int) -> None:
    problem = problem_of(seed)
    found = plan(problem)
    if found.schedule is None or found.simulation is None:
        assert found.solution.status is Status.INFEASIBLE
        return
    assert found.solution.lower_bound_s <= found.simulation.step_s * (1 + 1e-6)
    free = replace(found.schedule, rates=replace(problem.rates, per_copy_s=0.0))
    assert simulate(free).step_s <= found.simulation.step_s


def test_the_simulator_charges_every_copy() -> None:
    schedule = tiny_schedule()
    slow = replace(schedule, rates=replace(schedule.rates, per_copy_s=0.5))
    links = schedule.rates.links

    def link_s(one):  # type: ignore[no-untyped-def]
        return [span.end_s - span.start_s for span in simulate(one).timeline if span.resource in links]

    before, after = link_s(schedule), link_s(slow)
    assert before and len(before) == len(after)
    assert sum(after) - sum(before) >= 0.5 * len(before) * (1 - 1e-9)


def test_values_that_take_longer_to_copy_than_to_make_again_stay() -> None:
    """Offloading moves few bytes and recomputing takes a second; only the seconds per copy decide."""
    keep, again = Option("keep", 1000, 0, 1.0, 1.0, 1100, 1100), Option("recompute", 0, 0, 1.0, 2.0, 1100, 1100)
    away = Option("offload", 0, 1000, 1.0, 1.0, 1100, 1100)
    blocks = tuple(Block(f"b{i}", (keep, again, away)) for i in range(6))
    frozen = Group("w", (TensorSize("w", 8),), (0,))
    problem = Problem(blocks, (frozen,), (), (), (), Rates(1e6, 1e6, 2e6), 1600, 100_000)

    def chosen(per_copy_s: float) -> set[str]:
        found = solve(replace(problem, rates=replace(problem.rates, per_copy_s=per_copy_s)))
        return {keep.name if o == 0 else "recompute" if o == 1 else "offload" for o in found.options[:-1]}

    assert "offload" in chosen(0.0)
    assert "offload" not in chosen(50.0)


def test_one_copy_of_many_bytes_takes_less_than_many_copies() -> None:
    rates = Rates(100.0, 50.0, 150.0, per_copy_s=0.25)
    into, out = rates.host.links
    assert rates.copy_s(100, into) == pytest.approx(1.25)
    assert rates.copy_s(100, out, copies=4) == pytest.approx(3.0)
    assert rates.copy_s(0, out, copies=4) == 0.0
    assert rates.faster(2).copy_s(100, into) == pytest.approx(0.75)


def test_what_takes_no_seconds_is_not_written() -> None:
    tier = Tier(Path("peer", 1.0, 1.0, 1.0), 5)
    assert "per_copy_s" not in str(Rates(1.0, 2.0, 3.0, tiers=(tier,)).to_dict())
    slow = Rates(1.0, 2.0, 3.0, tiers=(replace(tier, path=replace(tier.path, per_copy_s=0.5)),), per_copy_s=0.25)
    schedule = replace(tiny_schedule(), rates=slow)
    assert from_dict(to_dict(schedule)).rates == slow
