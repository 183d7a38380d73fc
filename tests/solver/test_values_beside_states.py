"""Parameters in files beside the states from which the host updates them, where RAM has no room for their values."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from offmate.solver import items
from offmate.solver.instances.synthetic import speculating
from offmate.solver.items import ItemKind, parameter
from offmate.solver.plan import plan
from offmate.solver.problem import RING_PIECES, Problem
from offmate.solver.resources import HOST, Resource
from offmate.solver.rounding.groups import round_solution
from offmate.solver.schedule import Kind, Schedule
from offmate.solver.scheduling.emit import host_bytes
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import simulate
from offmate.solver.solve import least_host_within_device, solve
from offmate.solver.text import from_dict, to_dict

from .test_states_in_files import BUFFERS, FILES, INTO, OUT, trained
from .test_updates_from_files import for_host_updates

SEEDS = (1, 2, 10)


def for_both(problem: Problem) -> Problem:
    """The problem with a drive for states, for parameters, and for updates on the host, which updates everything."""
    drive = for_host_updates(problem)
    tiers = tuple(replace(tier, for_parameters=True) for tier in drive.rates.tiers)
    groups = tuple(replace(group, side="host") if group.trainable else group for group in drive.groups)
    return replace(drive, groups=groups, rates=replace(drive.rates, tiers=tiers))


@functools.cache
def planned(seed: int) -> tuple[Problem, Schedule]:
    """A problem that has no plan unless values lie beside states in files, and its plan."""
    problem = for_both(trained(seed))
    sharing = replace(problem.with_parameters_in_ram, host_in_time=True)
    in_ram, in_files = (least_host_within_device(one) for one in (sharing, problem))
    assert in_ram is not None and in_files is not None and in_files < 0.95 * in_ram
    tensor = max(t.param_bytes + t.grad_bytes + t.state_bytes for g in problem.groups for t in g.tensors)
    problem = replace(problem, host_budget_bytes=min(int(0.95 * in_ram), in_files + 2 * tensor))
    schedule = plan(problem).schedule
    assert schedule is not None
    return problem, schedule


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_obey_the_rules(seed):
    """RAM has no values of what is updated from files, the drive has them all, and nothing sends them there."""
    problem, found = planned(seed)
    validate(found)
    assert not solve(replace(problem.with_parameters_in_ram, host_in_time=True)).options
    assert from_dict(to_dict(found)) == found
    assert all(used <= tier.capacity_bytes for tier, used in found.tiers)
    there = found.updated_from_files
    assert there and found.parameters_in_files == there == {item.name for item in found.trained_homes}
    values = {parameter(name) for name in there}
    assert {found.homes[item] for item in values} == {FILES}
    assert not any(action.kind is Kind.OFFLOAD and action.name in values for action in found.actions)
    rows = [(item, found.share_of_state(item, found.item_bytes[parameter(item.name)])) for name in there
            for item in found.states[name]]  # fmt: skip
    assert sum(own for _, own in rows) == sum(found.item_bytes[item] for item in values)
    assert found.ring_bytes == RING_PIECES * max(found.item_bytes[item] + own for item, own in rows)
    ((_, used_bytes),) = [row for row in found.tiers if row[0].name == FILES]
    in_files = [item for item in found.homes if item.kind in (ItemKind.STATE, ItemKind.PARAMETER)]
    assert used_bytes == sum(found.item_bytes[item] for item in in_files)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_read_follows_its_write_around_the_cycle(seed):
    """What comes to the device is what the last update has written, with the drive's rate and over the host's link."""
    _, found = planned(seed)
    spans = simulate(found).timeline
    order = {id(action): i for i, action in enumerate(found.actions)}
    for name in found.updated_from_files:
        updates = [span for span in spans if span.action.kind is Kind.UPDATE_CPU and span.action.name == name]
        written = [span for span in updates if span.resource == OUT]
        assert sum(span.bytes for span in written) == sum(map(found.passing_bytes_of, found.states[name]))
        reads = [span for span in spans if span.action.name == parameter(name) and span.resource == INTO]
        assert {span.bytes for span in reads} <= {found.item_bytes[parameter(name)]}
        after = [span for span in reads if order[id(span.action)] > order[id(updates[0].action)]]
        assert all(span.start_s >= max(one.end_s for one in written) for span in after)
        assert any(span.action.name == parameter(name) and span.resource == Resource.IN for span in spans)


@pytest.mark.parametrize("seed", SEEDS)
def test_whole_tensors_come_near_the_program(seed):
    problem, found = planned(seed)
    problem = replace(problem, host_in_time=bool(found.host_layout.places))
    assert simulate(found).step_s <= 1.3 * solve(problem).objective_s


def test_ram_has_the_ring_and_neither_states_nor_values():
    problem = for_both(trained(7))
    free = round_solution(problem.with_host_updates_in_ram, solve(problem.with_host_updates_in_ram))
    one = max((t for g in problem.groups if g.trainable for t in g.tensors), key=lambda tensor: tensor.state_bytes)
    plans = {plan.name: plan for plan in free.tensors}
    assert plans[one.name].cpu and plans[one.name].source == HOST
    moved = [p.updated_from(FILES, with_values=True) if p.name == one.name else p for p in free.tensors]
    saved = host_bytes(problem, free) - host_bytes(problem, replace(free, tensors=tuple(moved)))
    assert saved == one.param_bytes + one.state_bytes - RING_PIECES * one.passing_bytes(True) - BUFFERS


def test_values_without_states_beside_them_are_refused():
    _, found = planned(SEEDS[0])
    name = min(found.updated_from_files)
    homes = {item: home for item, home in found.homes.items() if item not in found.states[name]}
    with pytest.raises(ScheduleError, match="the host updates it, and its state is not there"):
        validate(replace(found, homes=homes))
    tiers = tuple(replace(tier, for_parameters=False) for tier in found.rates.tiers)
    with pytest.raises(ScheduleError, match="only to the host or to a tier for parameters"):
        validate(replace(found, rates=replace(found.rates, tiers=tiers)))


@pytest.mark.parametrize("seed", (2, 5))
def test_where_ram_has_room_schedules_are_those_without_it(seed):
    problem = for_both(trained(seed))
    assert to_dict(plan(problem).schedule) == to_dict(plan(problem.with_parameters_in_ram).schedule)


@pytest.mark.parametrize("seed", range(4))
def test_no_more_ram_for_having_it(seed):
    problem = for_both(trained(seed))
    less, more = (least_host_within_device(one) for one in (problem, problem.with_parameters_in_ram))
    assert less is not None and more is not None and less < more


def test_values_stay_in_ram_where_updates_come_before_the_gate():
    """Their old values have to be kept there until it opens."""
    problem = speculating(for_both(trained(10)))
    assert not problem.values_beside_states
    least = least_host_within_device(problem)
    assert least is not None
    found = plan(replace(problem, host_budget_bytes=int(1.3 * least))).schedule
    assert found is not None and not found.trained_homes
    assert all(items.parameter(name) not in found.homes for name in found.updated_from_files)
