"""The batch size as a decision: what scales, and which size wins."""

import random
from math import inf

import pytest
from offmate.solver.batch_size import BatchSizeTrial, _climb, best, scaled, try_batch_sizes
from offmate.solver.solve import solve

from .random_problems import random_problem


def climb(rates: dict[int, float], first: int) -> tuple[int, list[int]]:
    """The best size and the sizes tried, where `rates` gives samples per second; sizes without one do not fit."""

    def attempt(size: int) -> BatchSizeTrial:
        return BatchSizeTrial(size, size / rates[size] if size in rates else inf)

    trials = list(_climb(attempt, first))
    return best(trials).batch_size, [t.batch_size for t in trials]


def test_doubles_while_that_helps_then_looks_between():
    rates = {1: 1.0, 2: 1.9, 3: 2.5, 4: 3.0, 6: 3.3, 8: 3.1, 16: 2.0}
    assert climb(rates, 2) == (6, [2, 4, 8, 16, 6, 12])


def test_halves_until_something_fits():
    assert climb({1: 1.0, 2: 1.5, 3: 1.2}, 8) == (2, [8, 4, 2, 1, 3])


def test_equal_rates_go_to_the_smaller_batch():
    assert climb(dict.fromkeys(range(1, 65), 2.0), 4)[0] == 1


def test_nothing_fits():
    assert climb({}, 4) == (1, [4, 2, 1])


@pytest.mark.parametrize("seed", range(5))
def test_parameters_stay_and_activations_grow(seed):
    problem = random_problem(random.Random(seed), n_blocks=4)
    double = scaled(problem, 2.0)
    assert double.groups == problem.groups
    for one, two in zip(problem.blocks, double.blocks):
        for small, large in zip(one.options, two.options):
            assert large.saved_bytes == 2 * small.saved_bytes
            assert large.forward_s == pytest.approx(2 * small.forward_s)
            assert large.forward_peak_bytes == 2 * small.forward_peak_bytes
            assert small.backward_peak_bytes <= large.backward_peak_bytes <= 2 * small.backward_peak_bytes
    assert scaled(problem, 1.0) == problem


@pytest.mark.parametrize("seed", range(5))
def test_trials_are_solves_of_the_scaled_problem(seed):
    problem = random_problem(random.Random(seed), n_blocks=4)
    for trial in try_batch_sizes(problem, 2):
        found = solve(scaled(problem, trial.batch_size / 2))
        assert trial.step_s == pytest.approx(found.objective_s, rel=0.02)
