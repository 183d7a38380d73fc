"""RAM holds every parameter that has no home in files, whether it moves or not, and what no decision changes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from offmate.solver.files import load_problem, problem_from_dict, save, to_dict
from offmate.solver.items import ItemKind
from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from offmate.solver.schedule import Kind, Schedule
from offmate.solver.scheduling.validate import validate
from offmate.solver.solve import least_host

from .random_problems import random_problem
from .test_parameters_in_files import FILES, for_parameters

ROOM = 10**9


def roomy(seed: int, update: str = "planned") -> Problem:
    """A random problem on a device that has room for everything."""
    return replace(random_problem(random.Random(seed), n_blocks=3, tensors=2, update=update), device_budget_bytes=ROOM)


def planned(problem: Problem) -> Schedule:
    found = plan(problem).schedule
    assert found is not None
    validate(found)
    return found


@pytest.mark.parametrize("update", ["planned", "external"])
@pytest.mark.parametrize("seed", range(4))
def test_what_stays_on_the_device_is_in_ram_as_well(seed, update):
    problem = roomy(seed, update)
    trained = [group for group in problem.groups if group.trainable]
    params = sum(group.param_bytes for group in problem.groups)
    gradients = sum(group.grad_bytes for group in trained) if update == "external" else 0
    fewest = params + gradients
    assert fewest <= least_host(problem) <= fewest * (1 + 2e-6) + 256
    assert plan(replace(problem, host_budget_bytes=fewest - 1)).schedule is None
    found = planned(replace(problem, host_budget_bytes=max(fewest, least_host(problem))))
    assert found.host_bytes >= fewest


@pytest.mark.parametrize("seed", range(4))
def test_where_ram_has_no_room_for_it_its_home_is_in_files(seed):
    """Nothing moves for that, and the drive has room for it."""
    free = roomy(seed)
    groups = tuple(replace(g, side="device") if g.trainable else g for g in free.groups)
    problem = for_parameters(replace(free, groups=groups))
    trained = [tensor for group in problem.groups if group.trainable for tensor in group.tensors]
    values = sum(tensor.param_bytes for tensor in trained)
    frozen = sum(group.param_bytes for group in problem.groups if not group.trainable)
    assert not planned(replace(problem, host_budget_bytes=ROOM)).trained_homes
    short = planned(replace(problem, host_budget_bytes=frozen + problem.buffers_bytes + values // 2))
    assert short.parameters_in_files == {tensor.name for tensor in trained if tensor.param_bytes}
    assert short.host_bytes == frozen and short.rest_bytes <= short.host_budget_bytes
    moved = {a.item.kind for a in short.actions if a.kind in (Kind.PREFETCH, Kind.OFFLOAD)}
    assert ItemKind.PARAMETER not in moved
    ((_, there),) = [row for row in short.tiers if row[0].name == FILES]
    assert there == values
    assert (
        plan(replace(problem, host_budget_bytes=short.host_budget_bytes).with_capacities({FILES: 0})).schedule is None
    )


@pytest.mark.parametrize("seed", range(3))
def test_what_no_decision_changes_is_in_ram_in_every_plan(seed, tmp_path):
    problem = roomy(seed)
    more = replace(problem, host_fixed_bytes=4096)
    assert planned(more).host_bytes == planned(problem).host_bytes + 4096
    assert least_host(more) - least_host(problem) == 4096
    save(more, tmp_path / "problem.json")
    assert load_problem(tmp_path / "problem.json") == more
    assert "host_fixed_bytes" not in to_dict(problem) and problem_from_dict(to_dict(problem)) == problem
