"""Synthetic problems: sizes add up, computes meet the time asked for, plans exist."""

from __future__ import annotations

from dataclasses import replace

import pytest
from offmate.solver.instances.synthetic import Precision, Shape, Speeds, llama
from offmate.solver.plan import plan
from offmate.solver.problem import Rates
from offmate.solver.solve import solve

SHAPE = Shape(layers=4, hidden=256, intermediate=688, vocab=1000, batch=2, sequence=64)
SPEEDS = Speeds(1e11, 1e10, 1e9, 1e10, Rates(2e9, 2e9, 4e9))


@pytest.mark.parametrize("whole_layers", [False, True])
def test_sizes_and_seconds(whole_layers: bool) -> None:
    problem = llama(SHAPE, SPEEDS, 10**12, 10**12, whole_layers=whole_layers, iteration_s=0.5, activation_bytes=10**7)
    assert problem.n_blocks == (6 if whole_layers else 11)
    elements = 2 * 1000 * 256 + 4 * (4 * 256 * 256 + 3 * 256 * 688)
    assert sum(g.param_bytes for g in problem.groups) == 4 * elements
    assert sum(g.state_bytes for g in problem.groups) == 8 * elements
    assert sum(b.options[0].saved_bytes for b in problem.blocks) == pytest.approx(10**7, abs=100)
    assert solve(problem).objective_s == pytest.approx(0.5, rel=1e-2)


def test_tied_and_narrow() -> None:
    shape = replace(SHAPE, tied=True, kv_hidden=64, gated=False, attention_heads=4)
    problem = llama(shape, SPEEDS, 10**12, 10**12, precision=Precision(2, 2, 12, 2))
    assert problem.groups[0].uses == (0, 9, 12, 21)
    assert plan(problem).schedule is not None


def test_a_small_budget_has_a_plan() -> None:
    roomy = plan(llama(SHAPE, SPEEDS, 10**9, 10**12))
    assert roomy.simulation is not None
    tight = plan(llama(SHAPE, SPEEDS, roomy.simulation.peak_bytes // 4, 10**12))
    assert tight.simulation is not None
    assert tight.simulation.peak_bytes <= roomy.simulation.peak_bytes // 4


def test_too_fast_is_refused() -> None:
    with pytest.raises(ValueError, match="device updates alone"):
        llama(SHAPE, SPEEDS, 10**9, 10**12, iteration_s=1e-9)
