"""SuperOffload's casting roads as problems: sizes, seconds and bounds; offmate's road on a small model."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from offmate.solver.instances.casting import OURS, Casts, Exact, Road, Way, on_road
from offmate.solver.instances.synthetic import Precision, Shape, Speeds, llama
from offmate.solver.problem import Problem, Rates
from offmate.solver.solve import solve

SHAPE = Shape(layers=3, hidden=256, intermediate=1024, vocab=1000, batch=2, sequence=64, gated=False, tied=True)
RATES = Rates(3e9, 3e9, 6e9, host_memory_bytes_per_s=8e9)
CASTS = Casts(update_s=4e-9, chunks_s=0.4e-9, moved_s=4 / 3e9, device_s=0.1e-9)
PAPERS: tuple[Way, ...] = ("apart", "device")
ROADS = [Road(gradient, parameter) for gradient in PAPERS for parameter in PAPERS]


def small(budget_bytes: int = 10**8) -> Problem:
    speeds = Speeds(1e12, 1e11, 5e8, 1e10, RATES)
    return llama(SHAPE, speeds, budget_bytes, 10**9, precision=Precision(2, 2, 12, 2), whole_layers=True)


def seconds(problem: Problem, road: Road) -> float:
    """Of a step, at least."""
    return max(solve(on_road(problem, road, CASTS, exact), gap=1e-4).objective_s for exact in get_args(Exact))


def test_bytes_and_seconds_by_hand() -> None:
    assert OURS.link_bytes == (2, 2)
    assert Road("device", "device").link_bytes == (4, 4)
    assert Road("apart", "device").link_bytes == (2, 4)
    # float32 AdamW moves 28 bytes; with a copy in half precision the gradient has 2 and the copy is read and written.
    assert Road("device", "device").host_bytes == 28
    assert OURS.host_bytes == 30
    assert CASTS.host_s(Road("device", "device")) == CASTS.update_s
    assert CASTS.host_s(OURS) == pytest.approx(4.4e-9)
    # Cast and copy apart take twice the copy in single precision, and the copy in half precision is on the link.
    copied_s = 2 / 3e9
    assert CASTS.host_s(Road("apart", "device")) + copied_s == pytest.approx(CASTS.update_s + 2 * CASTS.moved_s)


@pytest.mark.parametrize("exact", get_args(Exact))
def test_a_road_without_casts_on_the_device_keeps_all_sizes(exact: Exact) -> None:
    plain = small()
    found = on_road(plain, Road("apart", "chunks"), CASTS, exact)
    assert found.blocks == plain.blocks
    assert found.device_budget_bytes == plain.device_budget_bytes
    assert [g.tensors for g in found.groups] == [g.tensors for g in plain.groups]


def test_casts_on_the_device_double_the_bytes_of_the_link_or_none() -> None:
    plain, road = small(), Road("device", "device")
    link, memory = (on_road(plain, road, CASTS, exact) for exact in ("link", "memory"))
    for group, moved, held in zip(plain.groups, link.groups, memory.groups):
        assert (moved.grad_bytes, moved.param_bytes) == (2 * group.grad_bytes, 2 * group.param_bytes)
        assert (held.grad_bytes, held.param_bytes) == (group.grad_bytes, group.param_bytes)
        assert moved.state_bytes == held.state_bytes == group.state_bytes
    more = link.device_budget_bytes - plain.device_budget_bytes
    assert more >= sum(group.param_bytes for group in plain.groups)
    assert memory.device_budget_bytes == plain.device_budget_bytes


def test_what_the_device_updates_costs_no_cast() -> None:
    """All computes and the device's updates together take as long as without casts."""
    plain = small(10**9)
    device = replace(plain, groups=tuple(replace(group, side="device") for group in plain.groups))
    cast = on_road(device, Road("device", "device"), CASTS, "memory")
    assert cast.endless_s == pytest.approx(device.endless_s)


@pytest.mark.parametrize("gate", [False, True])
def test_where_the_program_chooses_none_of_the_papers_roads_is_faster_than_offmates(gate: bool) -> None:
    """Where link and memory of the host are short, what casts save of the host's seconds costs more there."""
    plain = small(3 * 10**7)
    if gate:
        plain = replace(plain, gate=True, turn_around_steps=6)
    ours = seconds(plain, OURS)
    for road in ROADS:
        assert ours <= seconds(plain, road) * 1.001, road


def test_slow_casts_make_a_road_slower_where_the_host_updates_all() -> None:
    plain = small()
    host = replace(plain, groups=tuple(replace(group, side="host") for group in plain.groups))
    slow = replace(CASTS, chunks_s=3 * CASTS.update_s)
    quick, late = (solve(on_road(host, OURS, casts), gap=1e-4).objective_s for casts in (CASTS, slow))
    assert late > 1.5 * quick
