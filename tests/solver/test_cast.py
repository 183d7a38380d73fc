"""Parameters of which RAM has float32 copies alone, cast for each copy to the device where that makes a plan faster."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from offmate.solver import items
from offmate.solver.files import problem_from_dict, solution_from_dict
from offmate.solver.files import to_dict as in_json
from offmate.solver.instances.synthetic import speculating
from offmate.solver.items import parameter
from offmate.solver.plan import plan
from offmate.solver.problem import RING_PIECES, Block, Group, Option, Problem, Rates, TensorSize
from offmate.solver.resources import Path, Resource, Tier
from offmate.solver.rounding.groups import round_solution
from offmate.solver.schedule import Kind, Schedule
from offmate.solver.scheduling.emit import host_bytes
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import simulate
from offmate.solver.solve import least_host_within_device, solve
from offmate.solver.text import from_dict, to_dict

from .test_states_in_files import FILES, trained
from .test_values_beside_states import for_both

COPIES = "float32 copies"
BUFFERS = 100
SEEDS = (1, 3, 6)


def castable(problem: Problem, rate: float = 3.0) -> Problem:
    """The problem with a drive, and a host that casts so many times as fast as its link."""
    drive = for_both(problem)
    speed = rate * drive.rates.in_bytes_per_s
    tier = Tier(Path(COPIES, speed, speed, 2 * speed, through_host=True), 0, buffers_bytes=BUFFERS, casts=True)
    groups = tuple(replace(group, has_copies=group.trainable) for group in drive.groups)
    return replace(drive, groups=groups, rates=replace(drive.rates, tiers=(*drive.rates.tiers, tier)))


@functools.cache
def planned(seed: int) -> tuple[Problem, Schedule]:
    """A problem whose states are a little more than RAM holds, and its plan."""
    problem = castable(trained(seed))
    states = sum(group.state_bytes for group in problem.groups if group.trainable)
    values = sum(group.param_bytes for group in problem.groups if group.trainable)
    least = least_host_within_device(problem)
    assert least is not None
    problem = replace(problem, host_budget_bytes=max(int(1.1 * least), int(0.8 * (states + values))))
    schedule = plan(problem).schedule
    assert schedule is not None
    return problem, schedule


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_obey_the_rules(seed):
    """What is cast is updated in RAM, takes no RAM itself, and never leaves the device."""
    _, found = planned(seed)
    validate(found)
    assert from_dict(to_dict(found)) == found
    assert all(used <= tier.capacity_bytes for tier, used in found.tiers if not tier.casts)
    names = found.cast_parameters
    assert names and names <= found.update_cpu_s.keys() - found.updated_from_files
    assert names <= found.parameters_in_files
    values = {parameter(name) for name in names}
    assert {found.homes[item] for item in values} == {COPIES}
    assert not any(action.kind is Kind.OFFLOAD and action.name in values for action in found.actions)
    in_ram = replace(found, homes={item: home for item, home in found.homes.items() if item not in values})
    assert in_ram.cast_parameters == frozenset()
    ((_, there),) = [row for row in found.tiers if row[0].name == FILES]
    ((_, without),) = [row for row in in_ram.tiers if row[0].name == FILES]
    assert there - without == sum(found.item_bytes[item] for item in values), "the drive has room for who reads them"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cast_follows_the_update_and_takes_the_hosts_link_as_well(seed):
    _, found = planned(seed)
    spans, into = simulate(found).timeline, found.rates.paths[COPIES].into
    for name in found.cast_parameters:
        own = [span for span in spans if span.action.name == parameter(name)]
        casts, copies = ([s for s in own if s.resource == link] for link in (into, Resource.IN))
        assert len(casts) == len(copies) > 0
        for one, then in zip(casts, copies):
            assert one.end_s <= then.start_s + 1e-12
            assert one.bytes == then.bytes == found.item_bytes[parameter(name)]


def test_a_known_optimum():
    """Where nothing but the drive takes time: 14 bytes, 12 of them states, 6 bytes of RAM, and a ring of r bytes.

    A part y has its states and values in files, and moves. Without casts 14 (1 - y) + r y = 6. With casts
    12 (1 - y) + r y = 6, since what is not in files is cast.
    """
    unit, n = 10**5, 100
    problem = Problem(
        blocks=(Block("0", (Option("keep", 0, 0, 1e-3, 1e-3, 0, 0),)),),
        groups=(
            Group("w", tuple(TensorSize(f"w{i}", 2 * unit, 0, 12 * unit) for i in range(n)), (0, 1), (1,),
                  1e-6, 1e-6, side="host", has_copies=True),
        ),
        values=(), shared=(), outputs=(),
        rates=Rates(
            1e10, 1e10, 2e10,
            tiers=(
                Tier(Path(FILES, 1e7, 1e7, 2e7, through_host=True), 10**10, for_states=True, for_parameters=True,
                     for_host_updates=True),
                Tier(Path(COPIES, 1e10, 1e10, 2e10, through_host=True), 0, casts=True),
            ),
        ),
        device_budget_bytes=10**9, host_budget_bytes=6 * unit * n, host_in_time=True,
    )  # fmt: skip
    r = RING_PIECES * 14 / n
    without, cast = (solve(one, gap=1e-6).objective_s for one in (problem.without_casts, problem))
    assert without / cast == pytest.approx((8 / (14 - r)) / (6 / (12 - r)), rel=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_the_program_is_never_slower_for_it(seed):
    problem = replace(castable(trained(seed)), host_in_time=True)
    least = least_host_within_device(problem)
    assert least is not None
    for room in (1.02, 1.3, 2.0):
        tried = replace(problem, host_budget_bytes=int(room * least))
        less, more = solve(tried), solve(tried.without_casts)
        assert less.options
        assert not more.options or less.objective_s <= more.objective_s * (1 + 1e-3)


def test_it_makes_a_program_faster_where_the_drive_limits():
    """States that fit where values were need not be read and written."""
    problem = replace(castable(trained(1)), host_in_time=True)
    least = least_host_within_device(problem)
    assert least is not None
    gains = []
    for room in (1.5, 2.0, 2.5, 3.0):
        tried = replace(problem, host_budget_bytes=int(room * least))
        gains.append(solve(tried.without_casts).objective_s / solve(tried).objective_s)
    assert max(gains) > 1.05


def test_ram_has_no_values_of_what_is_cast():
    problem = castable(trained(7))
    free = round_solution(problem.without_casts, solve(problem.without_casts))
    one = max((t for g in problem.groups if g.trainable for t in g.tensors), key=lambda tensor: tensor.param_bytes)
    plans = {plan.name: plan for plan in free.tensors}
    assert plans[one.name].may_be_cast
    moved = [replace(p, source=COPIES) if p.name == one.name else p for p in free.tensors]
    saved = host_bytes(problem, free) - host_bytes(problem, replace(free, tensors=tuple(moved)))
    assert saved == one.param_bytes - BUFFERS


@pytest.mark.parametrize("seed", (2, 5))
def test_where_ram_has_room_schedules_are_those_without_it(seed):
    problem = castable(trained(seed))
    assert to_dict(plan(problem).schedule) == to_dict(plan(problem.without_casts).schedule)


def test_only_what_the_host_updates_in_ram_is_cast():
    _, found = planned(SEEDS[0])
    name = min(found.cast_parameters)
    states = found.states.get(name, (items.state(name),))
    homes = {**found.homes, **dict.fromkeys(states, FILES)}
    sizes = {**found.item_bytes, **{item: found.item_bytes.get(item, 8) for item in states}}
    with pytest.raises(ScheduleError, match="only what the host updates in RAM is cast"):
        validate(replace(found, homes=homes, item_bytes=sizes))


def test_updates_before_the_gate_keep_values_in_ram():
    """Their old values have to be kept there until it opens."""
    problem = speculating(castable(trained(10)))
    assert problem.cast_tier is None
    least = least_host_within_device(problem)
    assert least is not None
    found = plan(replace(problem, host_budget_bytes=int(1.3 * least))).schedule
    assert found is not None and not found.cast_parameters


def test_groups_without_copies_are_as_they_were():
    problem = castable(trained(3))
    plain = replace(problem, groups=tuple(replace(group, has_copies=False) for group in problem.groups))
    one, other = solve(plain), solve(plain.without_casts)
    assert one.objective_s == pytest.approx(other.objective_s, rel=1e-2)
    assert not any(flow.cast for flow in one.groups.values())


def test_problems_and_answers_are_kept():
    problem, _ = planned(SEEDS[0])
    assert problem_from_dict(in_json(problem)) == problem
    answer = solve(replace(problem, host_in_time=True))
    assert any(flow.cast for flow in answer.groups.values())
    assert solution_from_dict(in_json(answer)) == answer
    assert "has_copies" not in in_json(trained(1))["groups"][0] and "casts" not in str(in_json(for_both(trained(1))))


def test_small_tensors_stay_in_ram():
    """Each would take a copy more, and spare next to nothing."""
    for seed in SEEDS:
        problem, found = planned(seed)
        for group in problem.groups:
            largest = max(tensor.param_bytes for tensor in group.tensors)
            cast = [t.param_bytes for t in group.tensors if t.name in found.cast_parameters]
            assert all(size > largest / 16 for size in cast)
