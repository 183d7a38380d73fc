"""Host memory in time: what is there in turn shares it, only where it has to, and never to anybody's loss."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from offmate.solver.files import problem_from_dict, to_dict
from offmate.solver.items import ItemKind
from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from offmate.solver.refinements import Improve
from offmate.solver.schedule import Kind, Schedule
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import simulate
from offmate.solver.solve import least_budget, solve

from .random_problems import gated, random_problem

TIGHT = 0.85  # of the host memory that a plan takes where there is plenty
FEW = (Improve(),)  # passes; further ones find faster schedules of the same whole tensors


def random_case(seed: int) -> Problem:
    """A problem of a few blocks, with or without a gate and several micro-batches; the host's memory is ample."""
    rng = random.Random(seed)
    problem = random_problem(rng, n_blocks=5, tensors=4, tied=seed % 2 == 0)
    if seed % 3:
        problem = gated(problem, rng, 3 if seed % 3 == 2 and seed % 4 == 0 else 1)
    problem = replace(thousandfold(problem), host_budget_bytes=10**9)
    return replace(problem, device_budget_bytes=int(1.2 * least_budget(problem).bytes))


def thousandfold(problem: Problem) -> Problem:
    """The same problem with a thousand times the bytes, beside which the alignment of places is nothing."""

    def more(data: Any, name: str = "") -> Any:
        if isinstance(data, dict):
            return {key: more(value, key) for key, value in data.items()}
        if isinstance(data, list):
            return [more(value, name) for value in data]
        return data * 1000 if data is not None and ("bytes" in name or name == "rises") else data

    return problem_from_dict(more(to_dict(problem)))


def host_highs(schedule: Schedule) -> list[int]:
    """The bytes on the host at every action of the second iteration, counted from what each action does."""
    sizes, layout, there = schedule.item_bytes, schedule.host_layout, set[object]()
    own = layout.used_bytes - layout.shared_bytes
    highs = []
    for number in range(2):
        for action in schedule.actions:
            ended = None
            if action.kind is Kind.OFFLOAD:
                there |= {action.item} & layout.places.keys()
            elif action.kind is Kind.PREFETCH and action.item.kind is not ItemKind.GRADIENT:
                ended = action.item
            elif action.kind in (Kind.UPDATE_CPU, Kind.UPDATE_DEVICE):
                ended = next((i for i in layout.places if i.kind is ItemKind.GRADIENT and i.name == action.name), None)
            if number:
                highs.append(own + sum(sizes[item] for item in there))
            there.discard(ended)
    return highs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_a_tight_host(seed: int) -> None:
    problem = random_case(seed)
    ample = plan(problem, ladder=FEW)
    assert ample.schedule is not None
    assert not ample.schedule.host_layout.places
    assert ample.schedule.host_layout.used_bytes == ample.schedule.host_bytes
    tight = replace(problem, host_budget_bytes=int(TIGHT * ample.schedule.host_bytes))
    found, apart = plan(tight, ladder=FEW), solve(tight)
    if found.schedule is None:
        assert not solve(replace(tight, host_in_time=True)).options or not apart.options
        return
    validate(found.schedule)
    layout = found.schedule.host_layout
    assert max(host_highs(found.schedule)) <= layout.used_bytes <= tight.host_budget_bytes
    if apart.options:
        assert solve(replace(tight, host_in_time=True)).objective_s <= apart.objective_s * 1.01


def shared_case() -> Schedule:
    """A schedule in which items share memory."""
    for seed in range(12):
        problem = random_case(seed)
        ample = plan(problem, ladder=FEW).schedule
        assert ample is not None
        found = plan(replace(problem, host_budget_bytes=int(TIGHT * ample.host_bytes)), ladder=FEW).schedule
        if found is not None and any(found.host_layout.neighbours.values()):
            return found
    raise AssertionError("no case shares memory")


def test_a_copy_waits_until_its_place_is_free() -> None:
    schedule = shared_case()
    item = next(item for item, others in schedule.host_layout.neighbours.items() if others)
    (other, *_) = schedule.host_layout.neighbours[item]
    simulation = simulate(schedule)
    came = [s for s in simulation.timeline if s.action.kind is Kind.OFFLOAD and s.action.name == item]
    gone = [
        span
        for span in simulation.timeline
        if (span.action.kind is Kind.PREFETCH and span.action.name == other)
        or (span.action.kind is Kind.UPDATE_CPU and other.kind is ItemKind.GRADIENT and span.action.name == other.name)
    ]
    assert came and gone
    for start, end in ((one.start_s, two.end_s) for one in came for two in gone):
        before = schedule.actions.index(gone[0].action) < schedule.actions.index(came[0].action)
        assert start >= end - 1e-9 if before else start + simulation.step_s >= end - 1e-9


def test_a_place_that_is_in_use_is_refused() -> None:
    schedule = shared_case()
    layout = schedule.host_layout
    validate(schedule)
    # As if all had the same place.
    broken = replace(schedule)
    everywhere = {one: (0, schedule.item_bytes[one]) for one in layout.places}
    broken.__dict__["host_layout"] = replace(layout, places=everywhere)
    with pytest.raises(ScheduleError, match="its place on the host is still in use by"):
        validate(broken)
