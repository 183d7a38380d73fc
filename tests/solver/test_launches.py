"""Blocks that take longer to launch than to run: what a plan says of them, and what a larger batch changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from offmate.solver.batch_size import scaled
from offmate.solver.explain import explain
from offmate.solver.files import problem_from_dict, to_dict
from offmate.solver.instances.synthetic import Shape, Speeds, llama
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, Rates
from offmate.solver.rows import Block, Launched, Option

LAUNCH_S = 0.5


def launched(option: Option, forward_s: float, backward_s: float) -> Option:
    seconds = Launched(option.forward_s, option.backward_s, forward_s, backward_s)
    longer = max(option.forward_s, forward_s), max(option.backward_s, backward_s)
    return replace(option, forward_s=longer[0], backward_s=longer[1], launched=seconds)


def with_launches(forward_s: float) -> Problem:
    shape = Shape(layers=2, hidden=64, intermediate=128, vocab=100, batch=2, sequence=16)
    plain = llama(shape, Speeds(1e9, 1e10, 1e9, 1e10, Rates(2e9, 2e9, 4e9)), 10**10, 10**12)
    blocks = (Block(b.name, tuple(launched(o, forward_s, 0.0) for o in b.options)) for b in plain.blocks)
    return replace(plain, blocks=tuple(blocks))


@pytest.fixture
def problem() -> Problem:
    """All forwards are bound by their launches, and no backward is."""
    return with_launches(LAUNCH_S)


def test_a_larger_batch_makes_only_the_devices_seconds_longer(problem: Problem) -> None:
    for factor in (1.0, 3.0, 1e6):
        for before, after in zip(problem.blocks, scaled(problem, factor).blocks):
            for own, larger in zip(before.options, after.options):
                assert own.launched is not None and larger.launched is not None
                assert larger.forward_s == max(LAUNCH_S, own.launched.forward_device_s * factor)
                assert larger.backward_s == own.launched.backward_device_s * factor
    assert scaled(scaled(problem, 1e6), 1e-6).blocks[0].options[0].forward_s == pytest.approx(LAUNCH_S)


def test_the_plan_says_what_launching_costs(problem: Problem) -> None:
    found = explain(problem, plan(problem), offers=False)
    n = len(problem.blocks)
    assert found.launching is not None and (found.launching.bound, found.launching.computes) == (n, 2 * n)
    assert found.launching.seconds == pytest.approx(sum(b.options[0].launch_bound_s for b in problem.blocks))
    assert (
        f"For {n} of {2 * n} forwards and backwards of blocks, the CPU launches operators more slowly than the GPU"
        in found.text()
    )


def test_nothing_is_said_where_launches_are_hidden() -> None:
    hidden = with_launches(1e-12)
    found = explain(hidden, plan(hidden), offers=False)
    assert found.launching is None and "launches" not in found.text()


def test_a_file_keeps_what_is_apart_and_says_nothing_where_nothing_is(problem: Problem) -> None:
    assert problem_from_dict(to_dict(problem)) == problem
    together = (Block(b.name, tuple(replace(o, launched=None) for o in b.options)) for b in problem.blocks)
    plain = replace(problem, blocks=tuple(together))
    assert "launched" not in str(to_dict(plain)) and problem_from_dict(to_dict(plain)) == plain
