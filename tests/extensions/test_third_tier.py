"""A memory beside the host with one slow path, stated as data: planned, simulated and replayed bit for bit."""

from __future__ import annotations

import copy
import functools
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offmate.runtime.devices.emulated import EmulatedDevice
from offmate.runtime.ledger import LimitExceeded
from offmate.solver import plan as planning
from offmate.solver.items import ItemKind
from offmate.solver.problem import Problem
from offmate.solver.resources import Path, Rates, Resource, Tier
from offmate.solver.schedule import Kind
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import simulate
from offmate.solver.solve import least_budget, solve
from offmate.solver.text import from_dict, to_dict, to_text

import offmate
from offmate.lowering import problem as lowering

from ..fuzz.figures import from_hardware_file
from ..fuzz.solved import QUICK
from ..offmate.loops import Loop, adamw, assert_same, batch, plain, tiny
from ..solver.random_problems import gated, in_rows, random_problem

# Several tests begin with the same plans.
plan = functools.cache(functools.partial(planning.plan, ladder=QUICK))
PEER = "peer"
INTO, OUT = Path(PEER, 1.0, 1.0, 1.0).links


def peer(capacity_bytes: int, bytes_per_s: float) -> Tier:
    """Another device's memory, say, on a path that carries as much in both directions together as in one."""
    return Tier(Path(PEER, bytes_per_s, bytes_per_s, bytes_per_s), capacity_bytes)


def beside(problem: Problem, capacity_bytes: int) -> Problem:
    """The problem with a peer whose path is three times slower than the host's."""
    tier = peer(capacity_bytes, problem.rates.in_bytes_per_s / 3)
    return replace(problem, rates=replace(problem.rates, tiers=(tier,)))


def tight(seed: int) -> Problem:
    """A random problem with a small device that makes all updates, with pieces of states and micro-batches at times."""
    rng = random.Random(seed)
    problem = in_rows(random_problem(rng, n_blocks=rng.choice((2, 3, 4))))
    groups = tuple(replace(group, side="device") for group in problem.groups)
    problem = replace(problem, groups=groups)
    if rng.random() < 0.5:
        problem = gated(problem, rng, rng.choice((1, 2, 3)))
    least = least_budget(problem).bytes
    return replace(problem, device_budget_bytes=int(least * rng.choice((1.0, 1.2, 1.6))))


def goes_to_the_peer(planned) -> bool:
    return planned.schedule is not None and any(a.name in planned.schedule.homes for a in planned.schedule.actions)


@given(st.integers(0, 10_000))
def test_planned_and_simulated(seed):
    """Every schedule keeps the rules and both capacities, and a second memory never makes the program slower."""
    problem = tight(seed)
    alone, both = solve(problem), solve(beside(problem, 1 << 20))
    assert both.objective_s <= alone.objective_s * (1 + 1e-2)
    planned = plan(beside(problem, 1 << 20))
    schedule = planned.schedule
    assert schedule is not None
    validate(schedule)
    assert from_dict(to_dict(schedule)) == schedule
    assert schedule.homes.keys() <= {a.name for a in schedule.actions if a.kind is Kind.OFFLOAD}
    busy = {event.resource for event in simulate(schedule).timeline}
    assert bool(schedule.homes) == (OUT in busy) == (INTO in busy)


def with_a_full_host(seed: int) -> tuple[Problem, Problem]:
    """A tight problem with half of the host memory that it would use, without and with a peer."""
    problem = tight(seed)
    schedule = plan(problem).schedule
    assert schedule is not None
    smaller = replace(problem, host_budget_bytes=schedule.host_bytes // 2)
    return smaller, beside(smaller, 1 << 20)


def test_it_takes_what_the_host_has_no_room_for():
    """Where the host is too small a plan exists with the peer alone, and its bytes there are those of its items."""
    found = 0
    for seed in range(6):
        alone, both = with_a_full_host(seed)
        planned = plan(both)
        if plan(alone).schedule is not None or not goes_to_the_peer(planned):
            continue
        found += 1
        schedule = planned.schedule
        (host, on_host), (tier, on_peer) = schedule.tiers
        assert (host.name, tier.name) == ("host", PEER)
        assert on_host == schedule.host_bytes <= host.capacity_bytes
        assert on_peer == sum(schedule.item_bytes[item] for item in schedule.homes) > 0
        assert f"{PEER}: {on_peer} of {1 << 20} B" in to_text(schedule)
    assert found >= 2


def test_it_may_be_just_large_enough():
    """A capacity that a schedule fills to the byte is enough for a schedule."""
    for seed in range(3):
        problem = with_a_full_host(seed)[1]
        schedule = plan(problem).schedule
        if schedule is not None and schedule.homes:
            (_, used) = schedule.tiers[1]
            assert plan(problem.with_capacities({PEER: used})).schedule is not None, seed


def test_its_capacity_is_kept():
    problem = next(both for both in (with_a_full_host(seed)[1] for seed in range(6)) if goes_to_the_peer(plan(both)))
    schedule = plan(problem).schedule
    assert schedule is not None
    too_small = replace(schedule.rates, tiers=(replace(schedule.rates.tiers[0], capacity_bytes=1),))
    with pytest.raises(ScheduleError, match=r"peer: \d+ bytes reserved, the budget is 1"):
        validate(replace(schedule, rates=too_small))
    parameter = next(item for item in schedule.item_bytes if item.kind is ItemKind.PARAMETER)
    with pytest.raises(ScheduleError, match="only to the host or to a tier for parameters"):
        validate(replace(schedule, homes={**schedule.homes, parameter: PEER}))
    item = next(iter(schedule.homes))
    with pytest.raises(ScheduleError, match="there is no tier 'attic'"):
        validate(replace(schedule, homes={item: "attic"}))


def compiled(monkeypatch: pytest.MonkeyPatch) -> Loop:
    """The tiny model on a small device, with less host memory than it asks for, and a peer."""
    model = tiny()
    optimizer = adamw(model)
    settings = {"optimizer": optimizer, "device": "emulated", "config": offmate.Config(cache_dir=None)}

    def planned(gpu_budget: int, cpu_budget: int) -> offmate.Plan:
        return offmate.plan(model, gpu_budget, cpu_budget=cpu_budget, example_inputs=batch(0), **settings)

    with from_hardware_file():
        least = planned(1 << 30, 1 << 30).least_budget_bytes
        known = planned(int(2.2 * least), 1 << 30)
        tier = peer(1 << 30, known.problem.rates.in_bytes_per_s / 3)
        monkeypatch.setattr(lowering, "Rates", functools.partial(Rates, tiers=(tier,)))
        cpu_budget = int(0.6 * known.host_bytes)
        known = planned(known.budget_bytes, cpu_budget)
        offmate.compile(model, known.budget_bytes, cpu_budget=cpu_budget, plan=known, **settings)
    return Loop(model, optimizer)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop = compiled(monkeypatch)
    yield loop
    loop.session.device.close()


def test_replayed_bit_for_bit(loop):
    """Losses, parameters and states are plain PyTorch's, and the peer holds what was planned, to the byte."""
    reference = plain()
    schedule = loop.model.offmate.plan.schedule
    assert {item.kind for item in schedule.homes} >= {ItemKind.STATE}
    assert loop.steps(0, 3) == reference.steps(0, 3)
    (_, planned_bytes), ledger = schedule.tiers[1], loop.executor.world.tiers[PEER]
    assert ledger.level_bytes == ledger.peak_bytes == planned_bytes
    assert_same(loop, reference)  # reading the states brings them to the host
    assert loop.steps(3, 6) == reference.steps(3, 6)
    assert_same(loop, reference)
    assert loop.model.offmate.peak_bytes <= loop.model.offmate.plan.budget_bytes


def test_the_optimizers_state_can_be_replaced(loop):
    """What waits on the peer is forgotten when the host's states are loaded anew."""
    reference = plain(2)
    loop.steps(0, 4)
    loop.model.load_state_dict(reference.model.state_dict())
    loop.optimizer.load_state_dict(copy.deepcopy(reference.optimizer.state_dict()))
    assert loop.steps(2, 5) == reference.steps(2, 5)
    assert_same(loop, reference)


def states(loop: Loop) -> dict[tuple[int, str], torch.Tensor]:
    found = loop.optimizer.state_dict()["state"]
    return {(i, k): torch.as_tensor(v).clone() for i, state in found.items() for k, v in state.items()}


def assert_equal_states(loop: Loop, reference: Loop) -> None:
    ours, theirs = states(loop), states(reference)
    assert ours.keys() == theirs.keys()
    assert not [key for key in ours if not torch.equal(ours[key], theirs[key])]


def test_states_are_read_while_they_are_on_their_way_back(loop, monkeypatch):
    """What a copy has not filled yet is never taken for a state: the tier's own copy counts until the next update."""
    reference, copy_now = plain(3), EmulatedDevice._copy
    loop.steps(0, 3)

    def slow_copy(device, link, target, source):
        if link == INTO:
            target.fill_(77)
            time.sleep(0.1)
        copy_now(device, link, target, source)

    monkeypatch.setattr(EmulatedDevice, "_copy", slow_copy)
    ours, theirs = loop.forward(3), reference.forward(3)
    assert_equal_states(loop, reference)
    for one, loss in ((loop, ours), (reference, theirs)):
        loss.backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
    assert_equal_states(loop, reference)
    assert_same(loop, reference)


def test_a_copy_back_that_fails_loses_nothing(loop, monkeypatch):
    reference, copy_now, failed = plain(3), EmulatedDevice._copy, []
    loop.steps(0, 3)

    def failing_copy(device, link, target, source):
        if link == INTO and not failed:
            failed.append(link)
            target.fill_(77)
            raise OSError("the path broke")
        copy_now(device, link, target, source)

    monkeypatch.setattr(EmulatedDevice, "_copy", failing_copy)
    with pytest.raises(offmate.OffmateError, match="the path broke"):
        loop.step(3)
    before = states(reference)
    reference.step(3)
    after = states(reference)
    # Each state is that of before its update or of after it.
    for key, value in states(loop).items():
        assert torch.equal(value, before[key]) or torch.equal(value, after[key]), key


def test_its_path_is_in_the_trace(loop):
    with loop.model.offmate.record():
        loop.steps(0, 3)
    trace = loop.model.offmate.trace
    for timeline in (trace.predicted, trace.measured):
        assert {INTO, OUT, Resource.IN} <= timeline.rows.keys()
        assert {bar.row for bar in timeline.bars if bar.name in loop.model.offmate.plan.schedule.homes} == {INTO, OUT}
    assert INTO in trace._repr_html_()


def test_more_than_its_capacity_is_refused(loop):
    """The ledger of the tier is a hard limit, as the device's is."""
    loop.steps(0, 1)
    loop.executor.unload()
    ledger = loop.executor.world.tiers[PEER]
    ledger.limit_bytes = 64
    ledger.reset_peak()
    with pytest.raises((offmate.OffmateError, LimitExceeded), match="the budget is 64"):
        loop.steps(1, 3)


def test_a_device_without_the_tier_says_so(sim):
    from offmate.runtime.devices.streams import StreamDevice

    device = StreamDevice(torch.device("sim:0"), 1 << 30)
    with pytest.raises(ValueError, match="sim:0 has no tier 'peer'"):
        device.empty_on(PEER, torch.ones(2))
    device.close()
