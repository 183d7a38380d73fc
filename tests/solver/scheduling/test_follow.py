"""A schedule's decisions carried out with other sizes."""

import random
from dataclasses import replace

import pytest
from offmate.solver.fat_steps import in_passes
from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from offmate.solver.scheduling.follow import excess_bytes, follow, side_by_side
from offmate.solver.simulate import memory_highs
from offmate.solver.solve import least_budget

from ..random_problems import gated, random_problem


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


def shrunk(problem: Problem, rng: random.Random) -> Problem:
    """The problem for another batch, of which each value has some share of its bytes, and so has each peak."""

    def smaller(part, *names):
        return replace(part, **{name: rng.randint(1, getattr(part, name)) for name in names if getattr(part, name)})

    def other(option):
        option = smaller(option, "saved_bytes", "offloaded_bytes")
        return replace(option, **{
            name: rng.randint(getattr(option, name) * 3 // 4, getattr(option, name))
            for name in ("forward_peak_bytes", "backward_peak_bytes")
        })  # fmt: skip

    return replace(
        problem,
        blocks=tuple(replace(b, options=tuple(map(other, b.options))) for b in problem.blocks),
        values=tuple(smaller(v, "bytes", "grad_bytes") for v in problem.values),
    )


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_batches_side_by_side_hold_no_more_than_the_largest_ones(seed, count):
    """At no action, in one pass or two, whichever slots they are in; and one that would is told apart."""
    rng = random.Random(seed)
    one = gated(random_problem(rng, update="planned"), rng, 1)

    def of_all(one: Problem) -> Problem:
        return replace(in_passes(one, count, 3), device_budget_bytes=budget)

    budget = least_budget(in_passes(one, count, 3)).bytes * 5 // 4
    found = plan(of_all(one)).schedule
    assert found is not None
    smaller = [follow(found, of_all(shrunk(one, rng))) for _ in range(12)]
    more = [(other, excess_bytes(found, other)) for other in smaller if other is not None]
    may = [other for other, bytes_more in more if bytes_more == 0]
    assert excess_bytes(found, found) == 0 and may
    most = memory_highs(found)
    for _ in range(10):
        mix = side_by_side(found, [rng.choice([found, *may]) for _ in range(3)])
        assert all(map(int.__le__, memory_highs(mix), most))
    item = next(item for item in found.item_bytes if item.kind.by_batch)
    larger = replace(found, item_bytes={**found.item_bytes, item: found.item_bytes[item] + 1})
    assert excess_bytes(found, larger) is None and excess_bytes(larger, found) == 0
    assert excess_bytes(found, replace(found, forward=found.forward[1:])) is None


def test_a_smaller_batch_whose_kernel_holds_more():
    """Side by side with the largest one, no moment holds more than that beyond the plan."""
    problem = in_passes(random_problem(random.Random(0), update="planned"), 3, 3)
    found = plan(replace(problem, device_budget_bytes=least_budget(problem).bytes * 5 // 4)).schedule
    assert found is not None
    computes = {
        name: replace(spec, rise_bytes=spec.rise_bytes + (37 if name.startswith("F1") else 0))
        for name, spec in found.computes.items()
    }
    greedy = replace(found, computes=computes)
    assert excess_bytes(found, greedy) == 37
    most, mix = memory_highs(found), memory_highs(side_by_side(found, [found, greedy, found]))
    assert max(ours - theirs for ours, theirs in zip(mix, most)) == 37
