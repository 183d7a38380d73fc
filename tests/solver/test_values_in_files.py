"""Activations and interface values that leave to files, where RAM has no room for them, and no sooner."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from offmate.solver.fat_steps import for_all
from offmate.solver.files import load_problem, save
from offmate.solver.instances.synthetic import Shape, Speeds, llama
from offmate.solver.items import ItemKind
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, Rates
from offmate.solver.resources import Path, Tier
from offmate.solver.schedule import Kind, Schedule
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import simulate
from offmate.solver.solve import least_budget, least_host_within_device, solve
from offmate.solver.text import from_dict, to_dict

FILES = "drive"
INTO, OUT = Path(FILES, 1.0, 1.0, 1.0).links
MICRO = (1, 3)


def long_sequences(micro: int, capacity_bytes: int = 2**40) -> Problem:
    """A small decoder with long sequences, on a device with hardly any room for them, beside a slow drive."""
    rates = Rates(1e9, 1e9, 2e9, 1e-6)
    shape = Shape(3, 64, 256, vocab=128, batch=1, sequence=2048, gated=False)
    one = llama(shape, Speeds(2e11, 1e10, 1e9, 1e10, rates), 1 << 40, 1 << 40)
    problem = for_all(one, micro)
    path = Path(FILES, 2.5e8, 2.5e8, 2.5e8, through_host=True)
    tier = Tier(path, capacity_bytes, buffers_bytes=64, for_states=True, for_values=True)
    drive = replace(rates, tiers=(tier,))
    return replace(problem, rates=drive, device_budget_bytes=int(1.2 * least_budget(problem).bytes))


@functools.cache
def planned(micro: int) -> tuple[Problem, Schedule]:
    """A problem that has no plan unless values are in files, and its plan."""
    problem = long_sequences(micro)
    in_ram, in_files = (least_host_within_device(one) for one in (problem.with_values_in_ram, problem))
    params = sum(group.param_bytes for group in problem.groups)
    assert in_ram is not None and in_files is not None and in_files - params < 0.1 * (in_ram - params)
    problem = replace(problem, host_budget_bytes=(params + in_ram) // 2)
    schedule = plan(problem).schedule
    assert schedule is not None
    return problem, schedule


@pytest.mark.parametrize("micro", MICRO)
def test_plans_obey_the_rules(micro):
    """RAM has none of what is in files, the drive all of it, and each micro-batch has its own."""
    problem, found = planned(micro)
    validate(found)
    assert not solve(problem.with_values_in_ram).options
    assert from_dict(to_dict(found)) == found
    assert all(used <= tier.capacity_bytes for tier, used in found.tiers)
    there = found.values_in_files
    assert {item.kind for item in there} <= {ItemKind.VALUE, ItemKind.OFFLOADED} and there
    assert {item.slot for item in there} == set(range(micro))
    stored = sum(found.item_bytes[item] for item in found.homes)
    assert found.most_bytes_in_files >= found.bytes_in_files + sum(found.item_bytes[item] for item in there)
    assert [used for tier, used in found.tiers if tier.name == FILES] == [stored]


@pytest.mark.parametrize("micro", MICRO)
def test_each_is_written_once_and_read_once_after_that(micro):
    _, found = planned(micro)
    spans = simulate(found).timeline
    for item in found.values_in_files:
        (written,) = (span for span in spans if span.action.name == item and span.resource == OUT)
        (read,) = (span for span in spans if span.action.name == item and span.resource == INTO)
        assert read.start_s >= written.end_s
        moves = [a.kind for a in found.forward + found.backward if a.name == item and a.kind is not Kind.FREE]
        assert moves == [Kind.OFFLOAD, Kind.PREFETCH]


def test_a_tier_for_states_alone_takes_none():
    _, found = planned(1)
    states_only = tuple(replace(tier, for_values=False) for tier in found.rates.tiers)
    with pytest.raises(ScheduleError, match="may leave only to the host or to a tier for them"):
        validate(replace(found, rates=replace(found.rates, tiers=states_only)))


@pytest.mark.parametrize("micro", MICRO)
def test_where_ram_has_room_schedules_are_those_without_it(micro):
    problem = replace(long_sequences(micro), host_budget_bytes=1 << 30)
    found, other = plan(problem).schedule, plan(problem.with_values_in_ram).schedule
    assert found is not None and other is not None and found.actions == other.actions


@pytest.mark.parametrize("micro", MICRO)
def test_no_slower_for_having_it(micro):
    problem, _ = planned(micro)
    room = replace(problem, host_budget_bytes=2 * problem.host_budget_bytes)
    free, beside = solve(room.with_values_in_ram), solve(room)
    assert beside.objective_s <= free.objective_s * (1 + 1e-2)
    least, without = plan(room), plan(room.with_values_in_ram)
    assert least.simulation is not None
    assert without.simulation is None or least.simulation.step_s <= without.simulation.step_s


def test_what_the_drive_has_no_room_for_stays():
    """With more RAM, half of the drive is enough."""
    problem, found = planned(1)
    (used,) = (used for tier, used in found.tiers if tier.name == FILES)
    smaller = replace(problem, host_budget_bytes=problem.host_budget_bytes + used).with_capacities({FILES: used // 2})
    schedule = plan(smaller).schedule
    assert schedule is not None and sum(schedule.item_bytes[item] for item in schedule.homes) <= used // 2


def test_files_of_problems_keep_it(tmp_path):
    problem = long_sequences(3)
    save(problem, tmp_path / "problem.json")
    assert load_problem(tmp_path / "problem.json") == problem
