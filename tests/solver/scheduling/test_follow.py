"""A schedule's decisions carried out with other sizes."""

import random
from dataclasses import replace

import pytest
from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from offmate.solver.scheduling.follow import follow
from offmate.solver.simulate import memory_highs
from offmate.solver.solve import least_budget

from ..random_problems import random_problem


def scaled(problem: Problem, factor: int) -> Problem:
    """The problem for a batch `factor` times as large: what belongs to parameters stays."""
    sizes = ("bytes", "grad_bytes", "saved_bytes", "offloaded_bytes", "forward_peak_bytes", "backward_peak_bytes")

    def grown(part):
        return replace(part, **{name: factor * getattr(part, name) for name in sizes if hasattr(part, name)})

    blocks = tuple(replace(b, options=tuple(map(grown, b.options))) for b in problem.blocks)
    return replace(
        problem,
        blocks=blocks,
        values=tuple(map(grown, problem.values)),
        outputs=tuple(map(grown, problem.outputs)),
        shared=tuple(map(grown, problem.shared)),
        start_peak_bytes=factor * problem.start_peak_bytes,
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_same_actions_with_other_sizes(seed):
    small = random_problem(random.Random(seed), update="planned" if seed % 2 else "external")
    large = scaled(small, 4)
    budget = least_budget(large).bytes * 5 // 4
    found = plan(replace(large, device_budget_bytes=budget)).schedule
    assert found is not None
    followed = follow(found, replace(small, device_budget_bytes=budget))
    assert followed is not None
    assert followed.actions == found.actions and followed.resident == found.resident
    assert max(memory_highs(followed)) < max(memory_highs(found))
    assert followed.host_bytes <= found.host_bytes
    assert follow(followed, replace(large, device_budget_bytes=budget)) == found
    assert follow(found, replace(large, device_budget_bytes=max(memory_highs(found)) - 1)) is None


def test_other_blocks_cannot_follow():
    problem = random_problem(random.Random(0))
    schedule = plan(problem).schedule
    assert schedule is not None
    without = replace(problem, shared=problem.shared[:1])
    assert follow(schedule, without) is None
