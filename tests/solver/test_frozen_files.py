"""Frozen parameters that come from files through the host, where the host is too small for them, and only there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offmate.solver.files import load_problem, save
from offmate.solver.items import ItemKind
from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from offmate.solver.resources import Path, Rates, Resource, Tier
from offmate.solver.schedule import Kind, Schedule
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import simulate
from offmate.solver.solve import least_budget, least_host_within_device, solve
from offmate.solver.text import from_dict, to_dict

from .random_problems import gated, random_problem

FILES = "files"
INTO = Path(FILES, 1.0, 1.0, 1.0).into
BUFFERS = 64


def adapted(seed: int) -> Problem:
    """A random problem of which all blocks are frozen and the embedding is trained, on a small device."""
    rng = random.Random(seed)
    problem = random_problem(rng, n_blocks=rng.choice((3, 4, 5)), tensors=3)
    frozen = tuple(
        replace(
            group,
            grad_steps=(),
            tensors=tuple(replace(t, grad_bytes=0, state_bytes=0) for t in group.tensors),
            cpu_update_s=0.0,
            device_update_s=0.0,
        )
        for group in problem.groups[1:]
    )
    problem = replace(problem, groups=(problem.groups[0], *frozen))
    if rng.random() < 0.5:
        problem = gated(problem, rng, rng.choice((1, 2, 3)))
    return replace(problem, device_budget_bytes=int(rng.choice((1.02, 1.2, 1.5)) * least_budget(problem).bytes))


def with_files(problem: Problem, slower: float = 4.0) -> Problem:
    """The problem with its frozen parameters in files, whose rate is a part of the link's."""
    rate = problem.rates.in_bytes_per_s / slower
    tier = Tier(Path(FILES, rate, rate, rate, through_host=True), 0, holds_frozen=True, buffers_bytes=BUFFERS)
    groups = tuple(replace(group, in_files=not group.trainable) for group in problem.groups)
    return replace(problem, groups=groups, rates=replace(problem.rates, tiers=(tier,)))


def frozen_bytes(problem: Problem) -> int:
    return sum(group.param_bytes for group in problem.groups if not group.trainable)


def trained_bytes(problem: Problem) -> int:
    return sum(group.update_bytes for group in problem.groups if group.trainable)


def short_of_host(seed: int, part: float) -> Problem:
    """A problem with files, and a host for what is trained and that part of what is not."""
    problem = with_files(adapted(seed))
    least = least_host_within_device(problem)
    assert least is not None
    return replace(problem, host_budget_bytes=least + trained_bytes(problem) + int(part * frozen_bytes(problem)))


def from_files(schedule: Schedule) -> int:
    """The bytes that an iteration reads from files, a middle pass counted once."""
    items = [action.item for action in schedule.actions if action.kind is Kind.PREFETCH]
    return sum(schedule.item_bytes[item] for item in items if schedule.homes.get(item) == FILES)


@given(st.integers(0, 10_000))
def test_whatever_the_host_holds(seed):
    """With files every host that holds what is trained is enough; its bytes are kept, and schedules obey the rules."""
    schedule = plan(short_of_host(seed, random.Random(seed).choice((0.0, 0.3, 0.8)))).schedule
    assert schedule is not None
    validate(schedule)
    assert from_dict(to_dict(schedule)) == schedule
    assert all(used <= tier.capacity_bytes for tier, used in schedule.tiers)
    spans = [span for span in simulate(schedule).timeline if span.action.name in schedule.homes]
    assert sum(s.bytes for s in spans if s.resource == INTO) == from_files(schedule)
    assert sum(s.bytes for s in spans if s.resource == Resource.IN) == from_files(schedule)  # on through the host
    assert {item.kind for item in schedule.homes} <= {ItemKind.PARAMETER}


@given(st.integers(0, 10_000))
def test_no_slower_for_having_them(seed):
    """Where the host has room for everything, files make the program no slower, and a small host no faster."""
    problem = adapted(seed)
    free, beside = solve(problem), solve(with_files(problem))
    assert beside.objective_s <= free.objective_s * (1 + 1e-2)
    small = solve(with_files(replace(problem, host_budget_bytes=max(4096, free.host_bytes // 2))))
    if small.options:
        assert small.objective_s >= free.lower_bound_s * (1 - 1e-6)


def test_a_host_of_its_own_size_needs_no_files():
    """Nothing is read from files, and no buffers are reserved, where the host can hold what leaves the device."""
    for seed in range(5):
        problem = with_files(adapted(seed))
        schedule = plan(problem).schedule
        assert schedule is not None and not schedule.homes
        alone = plan(replace(problem, rates=replace(problem.rates, tiers=()))).schedule
        assert alone is not None
        assert simulate(schedule).step_s <= simulate(alone).step_s * (1 + 1e-2)


def test_a_trained_parameter_never_comes_from_files():
    for seed in range(6):
        problem = short_of_host(seed, 0.0)
        schedule = plan(problem).schedule
        if schedule is None or not schedule.homes:
            continue
        trained = next(item for item in schedule.item_bytes if item.name == problem.groups[0].tensors[0].name)
        with pytest.raises(ScheduleError, match="a trained parameter may leave only to the host"):
            validate(replace(schedule, homes={**schedule.homes, trained: FILES}))
        written = replace(schedule.rates.tiers[0], holds_frozen=False)
        with pytest.raises(ScheduleError, match="only a frozen parameter may come from a tier"):
            validate(replace(schedule, rates=replace(schedule.rates, tiers=(written,))))
        return
    pytest.fail("no problem reads files")


def test_files_and_old_problems(tmp_path):
    """A problem with files is read as it was written, and one without them is written as before."""
    problem = with_files(adapted(0))
    save(problem, tmp_path / "with.json")
    assert load_problem(tmp_path / "with.json") == problem
    assert "tiers" not in Rates(1.0, 1.0, 1.0).to_dict()
    plain = Rates(1.0, 1.0, 1.0, tiers=(Tier(Path("attic", 1.0, 1.0, 1.0), 5),)).to_dict()
    assert plain["tiers"] == [
        {"capacity_bytes": 5, "path": {"tier": "attic", "in_bytes_per_s": 1.0, "out_bytes_per_s": 1.0,
                                       "both_bytes_per_s": 1.0}}
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["capacity_bytes", "buffers_bytes"])
@pytest.mark.parametrize("size", [-1, 1.5, True])
def test_sizes_that_cannot_be(name, size):
    tier = replace(Tier(Path(FILES, 1.0, 1.0, 1.0), 0), **{name: size})
    assert [(row, why) for row, why in Rates(1.0, 1.0, 1.0, tiers=(tier,)).faults()] == [
        ("tier files", f"{name} is {size!r}, must be a whole number from 0 on")
    ]
