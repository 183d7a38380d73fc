"""A second worker on the host that adds gradients up while the first one updates, stated as data."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from offmate.solver.resources import Rates, Resource, Worker
from offmate.solver.schedule import Kind
from offmate.solver.scheduling.validate import validate
from offmate.solver.simulate import simulate
from offmate.solver.solve import solve
from offmate.solver.text import from_dict, to_dict

import offmate
from offmate.lowering import problem as lowering

from ..fuzz.figures import from_hardware_file
from ..offmate.loops import Loop, adamw, assert_same, batch, plain, tiny
from ..solver.random_problems import gated, random_problem

ADDER = Resource("adder")
WORKERS = (Worker(ADDER, (Kind.ACCUMULATE_CPU.value,)),)
MICRO_BATCHES = 3


def accumulating(seed: int) -> Problem:
    """A random problem with fast links and several micro-batches, in which the host adds and updates everything."""
    rng = random.Random(seed)
    problem = gated(random_problem(rng, n_blocks=2), rng, rng.choice((2, 3)))
    problem = replace(problem, rates=problem.rates.faster(100))
    groups = (
        replace(
            group,
            cpu_update_s=20 * group.cpu_update_s,
            cpu_add_s=20 * group.cpu_update_s,
            side="host" * group.trainable or "any",
        )
        for group in problem.groups
    )
    return replace(problem, groups=tuple(groups))


def with_adder(problem: Problem) -> Problem:
    return replace(problem, rates=replace(problem.rates, workers=WORKERS))


@pytest.mark.parametrize("seed", range(4))
def test_planned_and_simulated(seed):
    """The program gives every worker a row of its own, and the simulator a queue: additions never wait for updates."""
    problem = accumulating(seed)
    assert solve(with_adder(problem)).objective_s <= solve(problem).objective_s * (1 + 1e-2)
    schedule = plan(with_adder(problem)).schedule
    assert schedule is not None
    validate(schedule)
    assert from_dict(to_dict(schedule)) == schedule
    by_resource = {Resource.CPU: {Kind.UPDATE_CPU}, ADDER: {Kind.ACCUMULATE_CPU}}
    for resource, kinds in by_resource.items():
        events = [event for event in simulate(schedule).timeline if event.resource == resource]
        assert {event.action.kind for event in events} <= kinds
        assert events


def test_it_is_faster_where_both_are_busy():
    """A step that the CPU's additions and updates limit takes as long as the longer of the two."""
    faster = []
    for seed in range(12):
        problem = accumulating(seed)
        alone, both = solve(problem).objective_s, solve(with_adder(problem)).objective_s
        faster.append(both < 0.98 * alone)
    assert sum(faster) >= 5


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr(lowering, "Rates", functools.partial(Rates, workers=WORKERS))
    model = tiny()
    optimizer = adamw(model)
    settings = {
        "device": "emulated",
        "cpu_budget": 1 << 30,
        "optimizer": optimizer,
        "accumulation_steps": MICRO_BATCHES,
        "config": offmate.Config(cache_dir=None),
    }
    with from_hardware_file():
        least = offmate.plan(model, 1 << 30, example_inputs=batch(0), **settings).least_budget_bytes
        known = offmate.plan(model, least, example_inputs=batch(0), **settings)
        offmate.compile(model, least, plan=known, **settings)
    loop = Loop(model, optimizer)
    yield loop
    loop.session.device.close()


def iteration(loop: Loop, first: int) -> list[float]:
    """One update from several micro-batches; their losses."""
    losses = []
    for i in range(MICRO_BATCHES):
        loss = loop.forward(first + i)
        (loss / MICRO_BATCHES).backward()
        losses.append(loss.item())
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return losses


def test_replayed_bit_for_bit(loop):
    """Additions run on a thread of their own, and numbers are plain PyTorch's."""
    reference, schedule = plain(), loop.model.offmate.plan.schedule
    assert schedule.add_cpu_s
    with loop.model.offmate.record():
        for first in range(0, 5 * MICRO_BATCHES, MICRO_BATCHES):
            assert iteration(loop, first) == iteration(reference, first)
    assert_same(loop, reference)
    trace = loop.model.offmate.trace
    for timeline in (trace.predicted, trace.measured):
        on_adder = {bar.word for bar in timeline.bars if bar.row == ADDER}
        assert on_adder == {"add to the total on the CPU"}
        assert {bar.word for bar in timeline.bars if bar.row == Resource.CPU} == {"update on the CPU"}
