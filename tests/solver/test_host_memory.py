"""Where the host's memory is slow: what copies and updates take of it bounds a step, and plans know it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from math import inf

import pytest
from offmate.solver import plan as planning
from offmate.solver.backends import default
from offmate.solver.linear import ONE, Builder, add, evaluate
from offmate.solver.machine import Machine
from offmate.solver.plan import plan
from offmate.solver.problem import Block, Group, Option, Problem, Rates, TensorSize
from offmate.solver.program.model import state_program
from offmate.solver.sharing import Speeds, least_seconds
from offmate.solver.simulate import keeps_budgets, simulate
from offmate.solver.solve import solve

from .random_problems import gated, limited, random_problem


def under(problem, device=0.6):
    """The problem with less device memory, so that something has to move."""
    ample = plan(problem)
    return replace(problem, device_budget_bytes=int(device * ample.simulation.peak_bytes))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
def test_a_plan_is_no_slower_than_one_that_ignores_the_limit(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, n_blocks=3 + seed % 3)
    problem = limited(gated(problem, rng, 1 + seed % 2) if seed % 3 else problem, rng)
    problem = under(problem, rng.choice([0.6, 0.8]))
    found = plan(problem)
    ignoring = plan(replace(problem, rates=problem.rates.with_endless_host_memory))
    if ignoring.schedule is None:
        assert found.schedule is None
        return
    assert found.schedule.rates == problem.rates and keeps_budgets(problem, found.schedule)
    assert found.simulation == simulate(found.schedule)
    assert found.simulation.step_s <= simulate(replace(ignoring.schedule, rates=problem.rates)).step_s
    assert found.solution.lower_bound_s <= found.simulation.step_s * (1 + 1e-6)


def test_where_the_program_fails_the_plan_without_the_limit_is_not_forgotten(monkeypatch):
    problem = limited(under(random_problem(random.Random(3), n_blocks=4)), random.Random(3))
    solved = planning.solve

    def fails(one, **limits):
        found = solved(one, **limits)
        return replace(found, options=()) if one.rates.host_memory_shares else found

    ignoring = plan(replace(problem, rates=problem.rates.with_endless_host_memory))
    monkeypatch.setattr(planning, "solve", fails)
    found = plan(problem)
    assert found.simulation.step_s <= simulate(replace(ignoring.schedule, rates=problem.rates)).step_s
    assert keeps_budgets(problem, found.schedule)


def test_ample_memory_changes_nothing():
    problem = under(random_problem(random.Random(3), n_blocks=4))
    ample = replace(problem.rates, host_memory_bytes_per_s=1e12, worker_bytes_per_s=1.0)
    assert solve(replace(problem, rates=ample)).objective_s == pytest.approx(solve(problem).objective_s)


def test_a_step_takes_as_long_as_its_bytes():
    """All that an iteration moves is one update on the host: its gradient leaves, its parameters return."""
    group = Group("w", (TensorSize("w", 1000, 1000, 2000),), (1, 2), (2,), cpu_update_s=1.0, side="host")
    blocks = tuple(Block(f"b{i}", (Option("keep", 0, 0, 1.0, 1.0, 1, 1000),)) for i in range(2))
    problem = Problem(blocks, (group,), (), (), (), Rates(1e6, 1e6, 2e6), 10_000, 10_000)
    limited_rates = replace(problem.rates, host_memory_bytes_per_s=500.0, worker_bytes_per_s=7000.0)
    found, endless = (solve(replace(problem, rates=rates), gap=1e-6) for rates in (limited_rates, problem.rates))
    computing_s, moving_s = 4.0, (1000 + 1000 + 7000) / 500
    assert moving_s * (1 - 1e-6) <= found.objective_s <= moving_s + computing_s
    assert endless.objective_s <= computing_s + 1.01


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_faster_in_the_simulator(seed):
    """Work of all kinds, however it overlaps, takes at least what the program says."""
    rng = random.Random(seed)
    rates = replace(
        Rates(25.0, 20.0, 40.0), host_memory_bytes_per_s=rng.uniform(15, 60), worker_bytes_per_s=rng.uniform(5, 50)
    )
    machine, busy = Machine(rates), dict.fromkeys(rates.host_memory_shares, 0.0)
    for _ in range(rng.randint(1, 12)):
        resource, seconds = rng.choice(list(busy)), rng.uniform(0.1, 3.0)
        machine.submit(resource, seconds)
        busy[resource] += seconds
        if rng.random() < 0.4:
            machine.run(rng.uniform(0.1, 2.0))
    while any(machine.submitted_s(resource) for resource in busy):
        machine.advance()
    columns = {resource: {column: 1.0} for column, resource in enumerate(busy)}
    for name, weights in least_seconds(rates):
        terms = add(*((weight, columns[resource]) for resource, weight in weights.items()))
        assert evaluate(terms, tuple(busy.values())) <= machine.now * (1 + 1e-9), name


@pytest.mark.parametrize("seed", range(30))
def test_some_overlap_is_as_fast_as_the_program_says(seed):
    """Loads on both links and the CPU need the largest of the program's sums, if each set works for the right time."""
    rng = random.Random(seed)
    links = Rates(in_bytes_per_s=rng.uniform(10, 30), out_bytes_per_s=25.0, both_bytes_per_s=rng.uniform(30, 50))
    rates = replace(links, host_memory_bytes_per_s=rng.uniform(40, 80), worker_bytes_per_s=rng.uniform(10, 40))
    load_s = {one: rng.uniform(0.1, 3.0) for one in rates.host_memory_shares}
    stated = [sum(weight * load_s[one] for one, weight in weights.items()) for _, weights in least_seconds(rates)]
    alone = [max(load_s[one] + max(0.0, 1 / rates.host.together - 1) * load_s[other], load_s[one])
             for one, other in (rates.host.links, rates.host.links[::-1])]  # fmt: skip
    assert max(*stated, *alone) == pytest.approx(_least_by_sets(rates, load_s), rel=1e-6)


def _least_by_sets(rates, load_s):
    """Return the least seconds in which sets of resources that work together do all loads."""
    program, speeds, done = Builder(), Speeds(rates), {one: [] for one in load_s}
    sets = [chosen for size in (1, 2, 3) for chosen in combinations(load_s, size)]
    columns = [program.column(" and ".join(chosen), inf) for chosen in sets]
    for chosen, column in zip(sets, columns):
        for one, speed in zip(chosen, speeds.of(chosen)):
            done[one].append((-speed, column))
    for one, work in done.items():
        program.at_most_zero(one, add(*work, (load_s[one], {ONE: 1.0})))
    return default().solve(program.freeze(add(*((1.0, column) for column in columns))), 10.0, 0.0).objective


def test_the_program_has_a_row_per_step_only_where_there_is_a_limit():
    problem = random_problem(random.Random(0))
    short = limited(problem, random.Random(0))
    rows, more = (len(state_program(one).model.rows) for one in (problem, short))
    sums = dict(least_seconds(short.rates))
    assert more == rows + len(sums) * problem.n_steps and "host memory" in sums
    assert not list(least_seconds(problem.rates))
