"""Updates on the host whose states come from files, piece by piece, where that makes a plan faster or possible."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import replace

import pytest
from offmate.solver import items
from offmate.solver.files import load_problem, save
from offmate.solver.instances.synthetic import speculating
from offmate.solver.missed import missed
from offmate.solver.plan import plan
from offmate.solver.problem import RING_PIECES, Problem
from offmate.solver.resources import Resource
from offmate.solver.rounding.groups import round_solution
from offmate.solver.schedule import Kind, Schedule
from offmate.solver.scheduling.emit import host_bytes
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import BusySpan, simulate
from offmate.solver.solve import least_host_within_device, solve
from offmate.solver.text import from_dict, to_dict

from .test_states_in_files import BUFFERS, FILES, INTO, OUT, trained, with_drive

SEEDS = (3, 7, 10)


def for_host_updates(problem: Problem, slower: float = 1.5) -> Problem:
    """The problem with a drive that is nearly as fast as the link, which is slow, and a host that updates fast."""
    drive = with_drive(problem, slower=slower)
    tiers = tuple(replace(tier, for_host_updates=True) for tier in drive.rates.tiers)
    groups = tuple(replace(group, cpu_update_s=group.cpu_update_s / 4) for group in drive.groups)
    return replace(drive, groups=groups, rates=replace(drive.rates, tiers=tiers))


@functools.cache
def planned(seed: int) -> tuple[Problem, Schedule]:
    """A problem that has no plan unless the host updates from files, and its plan."""
    problem = for_host_updates(trained(seed))
    in_ram, in_files = (least_host_within_device(one) for one in (problem.with_host_updates_in_ram, problem))
    assert in_ram is not None and in_files is not None and in_files < 0.95 * in_ram
    tensor = max(t.param_bytes + t.grad_bytes + t.state_bytes for g in problem.groups for t in g.tensors)
    problem = replace(problem, host_budget_bytes=min(int(0.95 * in_ram), in_files + 2 * tensor))
    schedule = plan(problem).schedule
    assert schedule is not None
    return problem, schedule


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_obey_the_rules(seed):
    """RAM and the drive keep to their bytes, and no state that the host updates is ever on the device."""
    problem, found = planned(seed)
    validate(found)
    assert from_dict(to_dict(found)) == found
    assert not solve(problem.with_host_updates_in_ram).options
    assert all(used <= tier.capacity_bytes for tier, used in found.tiers)
    there = found.updated_from_files
    assert there and there <= found.update_cpu_s.keys() & found.states_in_files
    states = {item for name in there for item in found.states[name]}
    assert {found.homes[item] for item in states} == {FILES}
    assert not states & {action.name for action in found.actions}
    assert found.ring_bytes == RING_PIECES * max(found.item_bytes[item] for item in states)
    sizes = {tensor.name: tensor.state_bytes for group in problem.groups for tensor in group.tensors}
    assert all(sum(found.item_bytes[item] for item in found.states[name]) == sizes[name] for name in there)


@pytest.mark.parametrize("seed", SEEDS[1:])
def test_whole_tensors_come_near_the_program(seed):
    problem, found = planned(seed)
    problem = replace(problem, host_in_time=bool(found.host_layout.places))
    assert simulate(found).step_s <= 1.2 * solve(problem).objective_s


@pytest.mark.parametrize("seed", SEEDS)
def test_pieces_pass_the_ring_in_order(seed):
    """Each is read, updated and written, the next ones at the same time, and never more than the ring has room for."""
    _, found = planned(seed)
    spans: dict[Resource, deque[BusySpan]] = {}
    for span in simulate(found).timeline:
        updates = span.action.kind is Kind.UPDATE_CPU and span.action.name in found.updated_from_files
        if updates:
            spans.setdefault(span.resource, deque()).append(span)
    assert spans.keys() == {INTO, Resource.CPU, OUT}  # and not the host's link
    pieces = sum(len(found.states[name]) for name in found.updated_from_files)
    read, updated, written = (list(spans[resource]) for resource in (INTO, Resource.CPU, OUT))
    assert len(read) == len(updated) == len(written) == pieces
    for number in range(pieces):
        assert read[number].end_s <= updated[number].start_s and updated[number].end_s <= written[number].start_s
        if number >= RING_PIECES:
            assert written[number - RING_PIECES].end_s <= read[number].start_s
    assert sum(span.bytes for span in read) == sum(span.bytes for span in written)


def test_ram_has_the_ring_and_not_the_states():
    problem = for_host_updates(trained(7))
    free = round_solution(problem.with_host_updates_in_ram, solve(problem.with_host_updates_in_ram))
    tensors = {tensor.name: tensor for group in problem.groups if group.trainable for tensor in group.tensors}
    on_host = replace(free, tensors=tuple(replace(p, cpu=p.name in tensors, states=()) for p in free.tensors))
    one = max(tensors.values(), key=lambda tensor: tensor.state_bytes)
    moved = tuple(replace(p, states_from=FILES if p.name == one.name else None) for p in on_host.tensors)
    saved = host_bytes(problem, on_host) - host_bytes(problem, replace(on_host, tensors=moved))
    assert saved == one.state_bytes - RING_PIECES * one.passing_bytes(False) - BUFFERS


def test_states_without_a_tier_for_that_are_refused():
    _, found = planned(SEEDS[0])
    tiers = tuple(replace(tier, for_host_updates=False) for tier in found.rates.tiers)
    with pytest.raises(ScheduleError, match="the host updates it, which takes a tier for host updates"):
        validate(replace(found, rates=replace(found.rates, tiers=tiers)))
    name = min(found.updated_from_files)
    first = found.states[name][0]
    homes = {item: home for item, home in found.homes.items() if item != first}
    with pytest.raises(ScheduleError, match="a state has one home"):
        validate(replace(found, homes=homes))


@pytest.mark.parametrize("seed", (2, 5))
def test_where_ram_has_room_schedules_are_those_without_it(seed):
    problem = for_host_updates(trained(seed))
    assert to_dict(plan(problem).schedule) == to_dict(plan(problem.with_host_updates_in_ram).schedule)


@pytest.mark.parametrize("seed", range(4))
def test_no_slower_for_having_it(seed):
    """The program is never slower, and needs no more RAM."""
    problem = for_host_updates(trained(seed))
    free, beside = solve(problem.with_host_updates_in_ram), solve(problem)
    assert beside.objective_s <= free.objective_s * (1 + 1e-2)
    less, more = (least_host_within_device(one) for one in (problem, problem.with_host_updates_in_ram))
    assert less is not None and more is not None and less <= more


@functools.cache
def speculated(part: float = 1.2) -> tuple[Problem, Schedule]:
    """A problem whose host updates may come before the gate, with little RAM and a slow drive, and its plan."""
    problem = speculating(for_host_updates(trained(10)))
    least = least_host_within_device(problem)
    assert problem.gate and least is not None
    problem = replace(problem, host_budget_bytes=int(part * least))
    found = plan(problem).schedule
    assert found is not None
    return problem, found


def test_updates_before_the_gate_log_parameters_and_take_second_places():
    """The old states stay in the files, where the new ones have places of their own."""
    problem, found = speculated()
    validate(found)
    assert from_dict(to_dict(found)) == found
    early = {action.name for action in found.actions if action.kind is Kind.SPECULATE_CPU}
    assert found.in_two_slots == early & found.updated_from_files != frozenset()
    tensors = {tensor.name: tensor for group in problem.groups for tensor in group.tensors}
    for name in found.update_cpu_s:
        in_files = name in found.updated_from_files
        logged = tensors[name].param_bytes if in_files else tensors[name].log_bytes
        assert found.item_bytes[items.log(name)] == logged
    second = sum(tensors[name].state_bytes for name in found.in_two_slots)
    (_, files) = found.tiers
    assert found.second_slots_bytes == second
    assert files[1] == second + sum(size for i, size in found.item_bytes.items() if found.homes.get(i) == FILES)


def test_a_drive_without_room_for_second_places_is_refused():
    _, found = speculated()
    ((_, _), (tier, used)) = found.tiers
    tiers = (replace(tier, capacity_bytes=used - 1),)
    with pytest.raises(ScheduleError, match=f"{used} bytes reserved, the budget is {used - 1}"):
        validate(replace(found, rates=replace(found.rates, tiers=tiers)))


def test_second_places_count_in_the_drives_capacity():
    """With room for the states once, fewer updates come before the gate, and the program is between the others."""
    problem, found = speculated()
    ((_, _), (_, used)) = found.tiers
    small = problem.with_capacities({FILES: used - found.second_slots_bytes})
    roomy_s, small_s, gated_s = (solve(p).objective_s for p in (problem, small, replace(small, speculates=False)))
    assert roomy_s < small_s <= gated_s * (1 + 1e-6)


def test_only_a_miss_moves_more_bytes():
    """It reads and writes those states twice of which the update had begun."""
    _, found = speculated()

    def moved(schedule: Schedule) -> tuple[int, int]:
        spans = simulate(schedule).timeline
        updates = [s for s in spans if s.action.kind in (Kind.UPDATE_CPU, Kind.SPECULATE_CPU)]
        into, out = (sum(span.bytes for span in updates if span.resource == link) for link in (INTO, OUT))
        return into, out

    states = sum(found.item_bytes[item] for name in found.updated_from_files for item in found.states[name])
    assert moved(found) == (states, states)
    assert moved(missed(found)) == (states + found.second_slots_bytes, states + found.second_slots_bytes)


def test_files_of_problems_keep_it(tmp_path):
    problem = for_host_updates(trained(1))
    problem = replace(problem, groups=tuple(replace(g, in_pieces_on_host=False) for g in problem.groups))
    save(problem, tmp_path / "problem.json")
    assert load_problem(tmp_path / "problem.json") == problem
    assert not any(map(problem.may_update_from_files, problem.groups))
