"""Deep Optimizer States' equation 1 is what the program finds where its assumptions hold, and no more than that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from offmate.solver.instances.update_phase import Throughputs, forced, ratio, stride, stride_s, update_phase
from offmate.solver.problem import update_steps
from offmate.solver.solve import solve

V100 = Throughputs(link=3e9, cpu_update=2e9, cpu_cast=8.7e9, device_update=35e9)  # the paper, section 5
N = 12


def test_equation_1_by_hand() -> None:
    """(3/3 + 1/35) / (1/2 + 1/8.7 - 1/6) = 1.02857 / 0.44828; the paper rounds it to 2."""
    assert stride(V100) == pytest.approx(2.2946, abs=1e-3)
    # A period: two on the host take 0.1229 s, one through the device 0.1 + 0.0333 + 0.0029 s; 4 periods.
    assert stride_s(V100, N) == pytest.approx(4 * 0.13619, rel=1e-3)


@pytest.mark.parametrize("machine", [V100, replace(V100, link=6.25e9), replace(V100, cpu_update=1e9)])
def test_the_program_finds_equation_1(machine: Throughputs) -> None:
    """With a device that updates in no time the ratios are equal; with the paper's they differ by its overlap."""
    instant = replace(machine, device_update=1e15)
    found = ratio(solve(update_phase(instant, subgroups=N, room=1.01), gap=1e-4))
    assert found == pytest.approx(stride(instant), rel=0.04)  # few subgroups: the pipeline fills
    solution = solve(update_phase(machine, subgroups=N, room=1.01), gap=1e-4)
    assert ratio(solution) == pytest.approx(stride(machine), rel=0.08)
    assert ratio(solution) <= stride(machine) * 1.001
    assert solution.objective_s < stride_s(machine, N)


def test_the_papers_case_takes_a_second_at_most() -> None:
    """24 subgroups; equation 1 needs 1.09 s. The number of turn-around steps is the one that plans get by default."""
    problem = update_phase(V100, room=1.01)
    assert problem.turn_around_steps == update_steps(problem.groups, problem.device_budget_bytes)
    assert solve(problem, gap=1e-3).objective_s <= 1.0 < stride_s(V100, 24)


def test_states_that_fit_stay() -> None:
    """Equation 1 knows no memory: with room for a quarter of the states a quarter of the work is gone."""
    tight, roomy = (solve(update_phase(V100, subgroups=N, room=room), gap=1e-4) for room in (1.01, 4))
    assert roomy.objective_s == pytest.approx(tight.objective_s * (N - 4) / (N - 1.01), rel=0.02)
    assert ratio(roomy) == pytest.approx(ratio(tight), rel=0.02)


def test_a_link_for_one_direction_at_a_time_moves_work_to_the_host() -> None:
    shared = solve(update_phase(V100, subgroups=N, room=1.01, both=1.0), gap=1e-4)
    # Out and in add up: 6/B for one through the device, so k is 6/B over what the host needs less its own copies.
    assert ratio(shared) == pytest.approx((6 / 3) / (1 / 2 + 1 / 8.7 - 1 / 6), rel=0.02)


def test_computes_hide_updates_and_copies() -> None:
    alone, behind = (solve(update_phase(V100, subgroups=N, room=1.01, compute_s=s), gap=1e-4) for s in (0.0, 2.0))
    assert behind.objective_s < 2.0 + 0.7 * alone.objective_s
    assert ratio(behind) > ratio(alone)


def test_a_forced_share_is_spread_evenly() -> None:
    """Every fourth subgroup, as the paper's stride of 4; the ends are all and none."""
    problem = update_phase(V100, subgroups=N)
    sides = [group.side for group in forced(problem, (1, 4)).groups]
    assert [i for i, side in enumerate(sides) if side == "device"] == [3, 7, 11]
    assert {group.side for group in forced(problem, (0, 1)).groups} == {"host"}
    assert {group.side for group in forced(problem, (1, 1)).groups} == {"device"}


@pytest.mark.parametrize("machine", [V100, replace(V100, link=6.25e9)])
def test_no_forced_share_is_faster_than_the_programs_own_choice(machine: Throughputs) -> None:
    problem = update_phase(machine, subgroups=N, room=2.5)
    own_s = solve(problem, gap=1e-4).objective_s
    for share in ((0, 1), (1, 4), (1, 3), (1, 2), (1, 1)):
        forced_s = solve(forced(problem, share), gap=1e-4).objective_s
        assert own_s <= forced_s * 1.0002 < float("inf"), share
