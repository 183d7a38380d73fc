"""Optimizer states that leave to files through the host, where RAM has no room for them, and only states."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
from offmate.solver.decisions import StateStay
from offmate.solver.files import load_problem, save
from offmate.solver.items import ItemKind
from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from offmate.solver.resources import HOST, Path, Resource, Tier
from offmate.solver.rounding.groups import round_solution
from offmate.solver.schedule import Kind, Schedule
from offmate.solver.scheduling.emit import host_bytes
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import simulate
from offmate.solver.solve import least_budget, least_host_within_device, solve
from offmate.solver.text import from_dict, to_dict

from .random_problems import gated, in_rows, random_problem

FILES = "drive"
INTO, OUT = Path(FILES, 1.0, 1.0, 1.0).links
BUFFERS = 64
SEEDS = (5, 6, 10, 12)


def trained(seed: int) -> Problem:
    """A random problem on a small device, with pieces of states and micro-batches at times."""
    rng = random.Random(seed)
    problem = in_rows(random_problem(rng, n_blocks=rng.choice((2, 3, 4)), tensors=2))
    if rng.random() < 0.5:
        problem = gated(problem, rng, rng.choice((1, 2, 3)))
    least = least_budget(problem).bytes
    return replace(problem, device_budget_bytes=int(least * rng.choice((1.1, 1.3, 1.6))))


def with_drive(problem: Problem, slower: float = 4.0, capacity_bytes: int = 2**40) -> Problem:
    """The problem with a drive whose rates are a part of the link's, and on which reads and writes take turns."""
    rate = problem.rates.in_bytes_per_s / slower
    path = Path(FILES, rate, rate, rate, through_host=True)
    tier = Tier(path, capacity_bytes, buffers_bytes=BUFFERS, for_states=True)
    return replace(problem, rates=replace(problem.rates, tiers=(tier,)))


def short_of_host(seed: int) -> Problem | None:
    """A problem with a drive, and RAM that is too little without it; None if there is no such RAM."""
    problem = trained(seed)
    without, beside = (least_host_within_device(one) for one in (problem, with_drive(problem)))
    if without is None or beside is None or beside >= 0.9 * without:
        return None
    tensor = max(t.param_bytes + t.grad_bytes + t.state_bytes for g in problem.groups for t in g.tensors)
    return replace(with_drive(problem), host_budget_bytes=min(int(0.95 * without), beside + 2 * tensor))


def moved(schedule: Schedule, kind: Kind) -> int:
    """The bytes of states that an iteration reads from the drive, or writes there."""
    items = [action.item for action in schedule.actions if action.kind is kind]
    return sum(schedule.item_bytes[item] for item in items if schedule.homes.get(item) == FILES)


@functools.cache
def planned(seed: int) -> tuple[Problem, Schedule]:
    problem = short_of_host(seed)
    assert problem is not None
    schedule = plan(problem).schedule
    assert schedule is not None
    return problem, schedule


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_plans_obey_the_rules(seed):
    """RAM and the drive keep to their bytes, what is written is read, and only states go there."""
    _, found = planned(seed)
    validate(found)
    assert from_dict(to_dict(found)) == found
    assert all(used <= tier.capacity_bytes for tier, used in found.tiers)
    assert {item.kind for item in found.homes} == {ItemKind.STATE}
    assert moved(found, Kind.PREFETCH) == moved(found, Kind.OFFLOAD)
    leaving = {a.item for a in found.actions if a.kind is Kind.OFFLOAD and a.item.kind is ItemKind.STATE}
    homes = {item.name: {found.homes.get(i, HOST) for i in leaving if i.name == item.name} for item in leaving}
    assert {name for name, tiers in homes.items() if FILES in tiers} <= found.states_in_files
    to_ram = {item for item in leaving if item not in found.homes}
    assert all((name in found.states_in_files) is not to_ram.issuperset(own) for name, own in found.states.items())
    assert not found.states_in_files & found.update_cpu_s.keys()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drive_makes_up_for_ram(seed):
    """RAM that is too little is enough with a drive, and whole tensors come near the program's seconds."""
    problem, schedule = planned(seed)
    assert not solve(replace(problem, rates=replace(problem.rates, tiers=()))).options
    assert simulate(schedule).step_s <= 1.2 * solve(problem).objective_s


@pytest.mark.parametrize("seed", range(6))
def test_no_slower_for_having_it(seed):
    """A drive never makes the program slower, and where RAM has room nothing lies on a slow one."""
    problem = trained(seed)
    free, beside = solve(problem), solve(with_drive(problem, slower=50.0))
    assert beside.objective_s <= free.objective_s * (1 + 1e-2)
    schedule = plan(with_drive(problem, slower=50.0)).schedule
    assert schedule is not None and not schedule.states_in_files


def test_ram_has_the_pieces_that_leave_to_it_once_any_leaves_to_files():
    """Without files it reserves a whole state for any piece."""
    problem = with_drive(in_rows(random_problem(random.Random(2), n_blocks=3, tensors=2)))
    answer = solve(replace(problem, device_budget_bytes=10 * problem.device_budget_bytes))
    free = round_solution(problem, answer)
    tensor = next(t for g in problem.groups if g.trainable for t in g.tensors if len(t.pieces) > 1)
    stays = [StateStay(rows, 0, 0) for rows in tensor.pieces]
    first_bytes = tensor.piece_bytes(stays[0].rows)

    def ram(*leaving: StateStay) -> int:
        by_device = (replace(plan, cpu=False, states=leaving * (plan.name == tensor.name)) for plan in free.tensors)
        return host_bytes(problem, replace(free, tensors=tuple(by_device)))

    def in_files(pieces: list[StateStay]) -> list[StateStay]:
        return [replace(stay, tier=FILES) for stay in pieces]

    assert ram(stays[0]) - ram() == tensor.state_bytes > first_bytes
    assert ram(stays[0], *in_files(stays[1:])) - ram() == first_bytes + BUFFERS
    assert ram(*in_files(stays)) - ram() == BUFFERS


def test_a_state_stays_on_the_device_until_it_is_written():
    """The buffers on the way to the drive are few, so that memory is not free before."""
    _, schedule = planned(SEEDS[0])
    spans = simulate(schedule).timeline
    written = {s.action.item: s.end_s for s in spans if s.resource == OUT}
    sent = {s.action.item: s.end_s for s in spans if s.resource == Resource.OUT and s.action.item in written}
    assert written and written.keys() == sent.keys() and all(sent[item] <= end for item, end in written.items())
    # The same drive with a fast link to it: what is freed waits for the drive, and not for the link.
    slow = tuple(replace(tier, path=tier.path.faster(0.1)) for tier in schedule.rates.tiers)
    slower = simulate(replace(schedule, rates=replace(schedule.rates, tiers=slow))).step_s
    assert slower > 5 * simulate(schedule).step_s


def test_a_full_drive():
    """The drive's capacity is a limit, as any other."""
    _, schedule = planned(SEEDS[0])
    used = {tier.name: used for tier, used in schedule.tiers}[FILES]
    with pytest.raises(ScheduleError, match=FILES):
        small = tuple(replace(tier, capacity_bytes=used - 1) for tier in schedule.rates.tiers)
        validate(replace(schedule, rates=replace(schedule.rates, tiers=small)))


def test_files_of_problems_keep_it(tmp_path):
    problem = with_drive(trained(1))
    save(problem, tmp_path / "problem.json")
    assert load_problem(tmp_path / "problem.json") == problem
