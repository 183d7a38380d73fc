"""Explanations name what is saturated, and offers say what would help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from offmate.solver.explain import explain
from offmate.solver.instances.synthetic import Shape, Speeds, llama
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, Rates

SHAPE = Shape(layers=3, hidden=256, intermediate=688, vocab=1000, batch=2, sequence=64)


def test_where_everything_fits_computes_limit_and_nothing_helps() -> None:
    problem = llama(SHAPE, Speeds(1e11, 1e10, 1e9, 1e10, Rates(2e9, 2e9, 4e9)), 10**10, 10**12)
    result = explain(problem, plan(problem))
    forward = result.phases[0]
    assert (forward.name, forward.limit) == ("forward", "compute")
    assert forward.busy["compute"] == pytest.approx(1.0, abs=0.02)
    more_memory = next(offer for offer in result.offers if "GPU memory" in offer.change)
    assert more_memory.saved_s <= 0.02 * result.step_s
    assert "The forward takes" in result.text() and "it is limited by GPU compute (100 %)" in result.text()
    assert sum(forward.waits.values()) == 0 and "waits" not in result.text().splitlines()[0]
    assert "One more GiB of GPU memory would save less than" in result.text()


def test_on_a_slow_link_a_faster_one_helps_most() -> None:
    problem = llama(SHAPE, Speeds(1e13, 1e12, 1e11, 1e12, Rates(1e8, 1e8, 2e8)), 10**10, 10**12)
    simulation = plan(problem).simulation
    assert simulation is not None
    tight = replace(problem, device_budget_bytes=int(0.45 * simulation.peak_bytes))
    result = explain(tight, plan(tight))
    assert {result.phases[0].limit, result.phases[1].limit} & {"copy in", "copy out"}
    offers = {offer.change: offer.saved_s for offer in result.offers}
    assert offers["a link twice as fast"] > offers["CPU updates twice as fast"]
    assert "With a link twice as fast, a step would take about" in result.text()
    waits = [phase.waits.get("copy in", 0.0) + phase.waits.get("copy out", 0.0) for phase in result.phases]
    assert 0 < sum(waits) < result.step_s
    assert "the GPU waits" in result.text() and "GPU memory is full" in result.text()


def test_where_the_users_code_updates_faster_updates_are_not_offered() -> None:
    problem = llama(SHAPE, Speeds(1e13, 1e12, 1e11, 1e12, Rates(1e8, 1e8, 2e8)), 10**10, 10**12)
    groups = tuple(
        replace(g, tensors=tuple(replace(t, state_bytes=0) for t in g.tensors), cpu_update_s=0.0, device_update_s=0.0)
        for g in problem.groups
    )
    problem = replace(problem, groups=groups, update="external")
    changes = [offer.change for offer in explain(problem, plan(problem)).offers]
    assert len(changes) == 3 and not any("updates" in change for change in changes)


def test_without_a_plan_there_is_nothing_to_explain() -> None:
    problem = llama(SHAPE, Speeds(1e13, 1e12, 1e11, 1e12, Rates(1e8, 1e8, 2e8)), 1000, 10**12)
    with pytest.raises(ValueError, match="no plan to explain"):
        explain(problem, plan(problem))


def test_where_host_memory_is_short_it_is_named_and_faster_memory_is_offered() -> None:
    rates = Rates(2e9, 2e9, 4e9, host_memory_bytes_per_s=1.5e9, worker_bytes_per_s=1.4e9)
    problem = llama(SHAPE, Speeds(1e13, 1e12, 2e8, 1e12, rates), 10**10, 10**12)
    tight = replace(problem, device_budget_bytes=int(0.4 * least_peak(problem)))
    result = explain(tight, plan(tight))
    busy = [phase.busy["host memory"] for phase in result.phases if phase.seconds]
    assert max(busy) > 0.9 and all(part <= 1 + 1e-6 for part in busy)
    assert "RAM bandwidth" in result.text()
    offers = {offer.change: offer.saved_s for offer in result.offers}
    assert offers["RAM twice as fast"] > 0.1 * result.step_s > offers["a link twice as fast"]


def least_peak(problem: Problem) -> int:
    simulation = plan(problem).simulation
    assert simulation is not None
    return simulation.peak_bytes
