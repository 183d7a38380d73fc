"""Trained parameters that leave to files, where RAM has no room for their values, and no sooner."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from offmate.solver.files import load_problem, save
from offmate.solver.items import ItemKind, parameter
from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from offmate.solver.schedule import Kind, Schedule
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import simulate
from offmate.solver.solve import least_host_within_device, solve
from offmate.solver.text import from_dict, to_dict

from .test_states_in_files import FILES, INTO, OUT, trained, with_drive

SEEDS = (5, 0, 10)


def for_parameters(problem: Problem, capacity_bytes: int = 2**40) -> Problem:
    """The problem with a drive for states and parameters."""
    drive = with_drive(problem, capacity_bytes=capacity_bytes)
    tiers = tuple(replace(tier, for_parameters=True) for tier in drive.rates.tiers)
    return replace(drive, rates=replace(drive.rates, tiers=tiers))


@functools.cache
def planned(seed: int) -> tuple[Problem, Schedule]:
    """A problem that has no plan unless parameters are in files, and its plan."""
    problem = for_parameters(trained(seed))
    in_ram, in_files = (least_host_within_device(one) for one in (problem.with_parameters_in_ram, problem))
    assert in_ram is not None and in_files is not None and in_files < 0.95 * in_ram
    tensor = max(t.param_bytes + t.grad_bytes + t.state_bytes for g in problem.groups for t in g.tensors)
    problem = replace(problem, host_budget_bytes=min(int(0.95 * in_ram), in_files + 2 * tensor))
    schedule = plan(problem).schedule
    assert schedule is not None
    return problem, schedule


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_obey_the_rules(seed):
    """Only the device updates what leaves to files, RAM has none of it, and the drive all of it."""
    problem, found = planned(seed)
    validate(found)
    assert not solve(problem.with_parameters_in_ram).options
    assert from_dict(to_dict(found)) == found
    assert all(used <= tier.capacity_bytes for tier, used in found.tiers)
    homes = {item.name for item in found.trained_homes}
    assert homes and homes <= found.parameters_in_files <= found.update_device_s.keys()
    moving = [a for a in found.actions if a.kind in (Kind.PREFETCH, Kind.OFFLOAD)]
    in_ram = {a.item.name for a in moving if a.item.kind is ItemKind.PARAMETER and a.item not in found.homes}
    assert not in_ram & found.parameters_in_files
    at_home = sum(found.item_bytes[parameter(name)] for name in homes)
    ((_, used_bytes),) = [row for row in found.tiers if row[0].name == FILES]
    assert used_bytes == at_home + sum(found.item_bytes[i] for i in found.homes if i.kind is ItemKind.STATE)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_read_follows_its_write_around_the_cycle(seed):
    """What an iteration reads is what the last update wrote, and the simulator waits for the write to end."""
    _, found = planned(seed)
    spans = [span for span in simulate(found).timeline if span.action.name in found.trained_homes]
    order = {id(action): i for i, action in enumerate(found.actions)}
    for item in found.trained_homes:
        written = [span for span in spans if span.action.name == item and span.resource == OUT]
        reads = [span for span in spans if span.action.name == item and span.resource == INTO]
        if not written and not reads:  # always on the device
            assert item in found.resident
            continue
        assert len(written) == 1
        after = [span for span in reads if order[id(span.action)] > order[id(written[0].action)]]
        assert all(span.start_s >= written[0].end_s for span in after)
        assert reads or item in found.resident


def test_a_read_before_its_write_is_found():
    """Neither a parameter without a write, nor one that is read first, passes for valid."""
    _, found = planned(SEEDS[0])
    item = min(a.item for a in found.actions if a.kind is Kind.PREFETCH and a.item in found.trained_homes)

    def without(actions):
        return tuple(a for a in actions if not (a.kind is Kind.OFFLOAD and a.name == item))

    parts = {name: without(getattr(found, name)) for name in ("forward", "backward", "turn_around")}
    with pytest.raises(ScheduleError, match="the host holds no copy of its new values"):
        validate(replace(found, **parts))


def test_what_the_host_updates_stays_in_ram():
    _, found = planned(SEEDS[0])
    with_host = replace(found, homes={**found.homes, parameter(next(iter(found.update_cpu_s), "")): FILES})
    with pytest.raises(ScheduleError, match=r"no such item|its state is not there"):
        validate(with_host)
    states_only = tuple(replace(tier, for_parameters=False) for tier in found.rates.tiers)
    with pytest.raises(ScheduleError, match="a trained parameter may leave only to the host or to a tier for"):
        validate(replace(found, rates=replace(found.rates, tiers=states_only)))


@pytest.mark.parametrize("seed", (2, 7))
def test_where_ram_has_room_schedules_are_those_without_it(seed):
    """They are those of a drive for states alone, action by action."""
    problem = for_parameters(trained(seed))
    assert to_dict(plan(problem).schedule) == to_dict(plan(problem.with_parameters_in_ram).schedule)


@pytest.mark.parametrize("seed", range(4))
def test_no_slower_for_having_it(seed):
    """The program is never slower, and needs no more RAM."""
    problem = for_parameters(trained(seed))
    free, beside = solve(problem.with_parameters_in_ram), solve(problem)
    assert beside.objective_s <= free.objective_s * (1 + 1e-2)
    less, more = (least_host_within_device(one) for one in (problem, problem.with_parameters_in_ram))
    assert less is not None and more is not None and less <= more


def test_files_of_problems_keep_it(tmp_path):
    problem = for_parameters(trained(1))
    save(problem, tmp_path / "problem.json")
    assert load_problem(tmp_path / "problem.json") == problem
