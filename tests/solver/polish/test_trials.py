"""Trials of urgency: valid, the same every time, never slower than the moves in time that they start from."""

import random
from dataclasses import replace

import pytest
from offmate.solver.polish.in_time import taken_in_time
from offmate.solver.polish.trials import best_of_trials
from offmate.solver.rounding.groups import round_solution
from offmate.solver.scheduling.emit import build_schedule
from offmate.solver.scheduling.validate import validate
from offmate.solver.simulate import simulate
from offmate.solver.solve import least_budget, solve

from ..random_problems import gated, random_problem
from ..tiny_schedule import tiny_schedule


def built(seed, micro_batches):
    problem = random_problem(random.Random(seed), n_blocks=4, tensors=3)
    problem = gated(problem, random.Random(seed), micro_batches) if micro_batches else problem
    least, ample = least_budget(problem).bytes, max(solve(problem).memory_bytes)
    problem = replace(problem, device_budget_bytes=int(least + 0.3 * max(0, ample - least)))
    return build_schedule(problem, round_solution(problem, solve(problem)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_batches", [0, 1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_is_valid_and_no_slower_than_the_first(seed, micro_batches):
    schedule = built(seed, micro_batches)
    best = best_of_trials(schedule, 50 * len(schedule.actions))
    validate(best)
    assert sorted(map(str, (a.kind for a in best.actions))) == sorted(map(str, (a.kind for a in schedule.actions)))
    assert simulate(best).step_s <= simulate(taken_in_time(schedule, 1.0)).step_s * (1 + 1e-9)


def test_shifts_are_never_worse_than_none_and_some_help():
    first, last = [], []
    for seed in range(6):
        schedule = built(seed, 0)
        starts = (taken_in_time(schedule, reach) for reach in (0.25, 0.5, 1.0, 2.0))
        first.append(min(simulate(start).step_s for start in starts if start is not None))
        last.append(simulate(best_of_trials(schedule, 60 * len(schedule.actions))).step_s)
    assert all(b <= a for a, b in zip(first, last))
    assert sum(last) < sum(first)


def test_the_same_schedule_gives_the_same_answer():
    assert best_of_trials(built(5, 0), 5000) == best_of_trials(built(5, 0), 5000)


def test_too_few_trials_are_not_made():
    schedule = built(5, 0)
    assert best_of_trials(schedule, 49 * len(schedule.actions)) is None
    assert best_of_trials(schedule, 50 * len(schedule.actions)) is not None


def test_a_budget_without_a_steady_order_gives_nothing():
    assert best_of_trials(replace(tiny_schedule(), device_budget_bytes=60), 1000) is None
