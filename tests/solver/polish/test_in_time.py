"""Moves taken in time: always valid, in the same order where nothing may cross, faster by hand and at random."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from offmate.solver.plan import plan
from offmate.solver.polish.improve import improve
from offmate.solver.polish.in_time import in_time
from offmate.solver.problem import Problem
from offmate.solver.rounding.groups import round_solution
from offmate.solver.schedule import Kind
from offmate.solver.scheduling.emit import build_schedule
from offmate.solver.scheduling.validate import validate
from offmate.solver.simulate import memory_highs, simulate
from offmate.solver.solve import least_budget, solve

from ..random_problems import gated, random_problem
from ..tiny_schedule import tiny_schedule


def test_what_leaves_is_held_until_its_bytes_are_needed() -> None:
    """With room for everything the only copy to the host that is waited for is the gradient's before its update."""
    (found, *_) = in_time(replace(tiny_schedule(), device_budget_bytes=500))
    validate(found)
    assert simulate(tiny_schedule()).stall_s["copy out"] == pytest.approx(8)
    assert simulate(found).stall_s["copy out"] == pytest.approx(1)


def test_a_tight_budget_is_kept() -> None:
    for found in in_time(tiny_schedule(device_budget_bytes=144)):
        validate(found)
        assert max(memory_highs(found)) <= 144
        assert simulate(found).step_s <= 24.5


def _squeezed(problem: Problem, room: float) -> Problem:
    least, ample = least_budget(problem).bytes, max(solve(problem).memory_bytes)
    return replace(problem, device_budget_bytes=int(least + room * max(0, ample - least)))


@given(
    st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 4), st.sampled_from(["planned", "external", 1, 2, 3, 5])
)
def test_every_variant_is_a_schedule(seed: int, blocks: int, tensors: int, kind: str | int) -> None:
    rng = random.Random(seed)
    update = "external" if kind == "external" else "planned"
    problem = random_problem(rng, n_blocks=blocks, tensors=tensors, update=update, tied=rng.random() < 0.3)
    problem = _squeezed(problem if isinstance(kind, str) else gated(problem, rng, kind), rng.random())
    base = build_schedule(problem, round_solution(problem, solve(problem)))
    usual_s = simulate(improve(base)).step_s
    done = sorted((a.kind.value, a.name) for a in base.actions)
    for found in in_time(base):
        validate(found)
        assert sorted((a.kind.value, a.name) for a in found.actions) == done
        assert [a.name for a in found.actions if a.kind is Kind.COMPUTE] == [
            a.name for a in base.actions if a.kind is Kind.COMPUTE
        ]
        note(f"{simulate(found).step_s / usual_s:.3f} of the usual time")


def test_the_same_schedule_gives_the_same_variants() -> None:
    problem = _squeezed(random_problem(random.Random(5), n_blocks=4, tensors=3), 0.3)
    base = build_schedule(problem, round_solution(problem, solve(problem)))
    assert list(in_time(base)) == list(in_time(base))
    assert plan(problem).schedule == plan(problem).schedule
