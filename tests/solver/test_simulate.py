"""Timelines and bytes worked out by hand."""

from dataclasses import replace
from math import inf

import pytest
from offmate.solver.machine import Machine
from offmate.solver.polish.improve import improve
from offmate.solver.problem import Rates
from offmate.solver.resources import Path, Resource, Tier
from offmate.solver.scheduling.validate import validate
from offmate.solver.simulate import memory_highs, room_bytes, simulate

from .tiny_schedule import FORWARD, after, tiny_schedule, without


def spans(simulation):
    return {str(e.action)[2:]: (round(e.start_s, 6), round(e.end_s, 6)) for e in simulation.timeline}


def test_the_tiny_timeline():
    # w's update (3 s) runs on into the next forward, whose first compute waits for it and for the copy (1 s). The
    # frees wait for a:0 (3 s), the state (4 s) and the gradient (1 s); the state's way in is hidden but for 3 s.
    simulation = simulate(tiny_schedule())
    assert spans(simulation) == {
        "prefetch p:w": (3, 4), "compute start": (0, 0), "compute F0": (4, 5), "offload a:0": (5, 8),
        "compute F1": (8, 10), "compute user": (10, 10), "prefetch a:0": (10, 13), "prefetch s:u": (13, 17),
        "compute B1": (10, 14), "update-device u": (17, 17.5), "offload s:u": (17.5, 21.5),
        "compute B0": (21.5, 23.5), "offload g:w": (23.5, 24.5), "update-cpu w": (24.5, 27.5),
    }  # fmt: skip
    assert simulation.step_s == pytest.approx(24.5)
    assert simulation.stall_s == pytest.approx({"compute": 0, "copy in": 4, "copy out": 8, "cpu": 3})


def test_the_tiny_bytes():
    simulation = simulate(tiny_schedule())
    levels = [high for _, high in simulation.memory]
    assert levels == [34, 36, 76, 74, 74, 54, 54, 50, 46, 76, 116, 144, 134, 134, 114, 114, 84, 46, 46, 36, 26, 24]
    assert (simulation.peak_bytes, str(simulation.peak_action)) == (144, "2 compute B1")


def test_computes_may_rise_up_to_the_peak():
    room = room_bytes(tiny_schedule())
    assert room == {"start": 108, "F0": 68, "F1": 90, "user": 98, "B1": 0, "B0": 60}


def test_late_frees_hide_copies_out():
    # With room for it all, nothing waits for copies out but the end of the iteration.
    improved = improve(tiny_schedule())
    validate(improved)
    simulation = simulate(improved)
    assert simulation.peak_bytes <= 200
    assert simulation.step_s < 24.5 - 3
    work = 1 + 2 + 4 + 2 + 0.5
    assert simulation.step_s >= work


def test_improving_stays_within_a_tight_budget():
    tight = tiny_schedule(device_budget_bytes=144)
    improved = improve(tight)
    validate(improved)
    assert max(memory_highs(improved)) <= 144
    assert simulate(improved).step_s <= simulate(tight).step_s


def test_copies_overlap_compute():
    hidden = tiny_schedule(
        forward=after(without(FORWARD, "0 free a:0"), "1 compute F1", "1 free a:0"), device_budget_bytes=500
    )
    assert simulate(hidden).step_s < simulate(tiny_schedule()).step_s


def test_a_compute_does_not_wait_for_copies_out():
    # v:h goes out while F1 reads it and comes back for B0's sake.
    forward = after(without(FORWARD, "1 free v:h"), "0 free a:0", "1 offload v:h")
    forward = after(forward, "1 free old:y", "1 free v:h")
    sent = tiny_schedule(forward=forward)
    validate(sent)
    times = spans(simulate(sent))
    assert times["offload v:h"] == (8, 8.8)
    assert times["compute F1"] == (8, 10)


def test_both_links_share_their_total_rate():
    machine = Machine(Rates(10.0, 5.0, 7.5))
    into, out = machine.submit(Resource.IN, 1.0), machine.submit(Resource.OUT, 2.0)
    machine.wait([into, out])
    # Both at half their rate until the one in is done (2 s); what is left out then runs at its own rate.
    assert (into.end_s, out.end_s) == pytest.approx((2.0, 3.0))


@pytest.mark.parametrize("both", [2.0, 2.8, 1.5, 4.0])
def test_links_of_unequal_rates_move_as_many_bytes_each_at_the_rate_of_both(both):
    """A disk reads 7 bytes per second, writes 1.4, and does both in turns (2.33), better or worse."""
    path = Path("drive", 7.0, 1.4, inf).moving_alike(both)
    machine = Machine(Rates(10.0, 10.0, 20.0, tiers=(Tier(path, 1),)))
    into, out = machine.submit(path.into, 14.0 / 7.0), machine.submit(path.out, 14.0 / 1.4)
    machine.wait([into, out])
    least_s = 14.0 / 1.4  # writes alone
    assert max(into.end_s, out.end_s) == pytest.approx(max(28.0 / both, least_s))
    assert path.alike_bytes_per_s == pytest.approx(min(both, 2 * 1.4))


def test_shared_cores_are_divided():
    machine = Machine(Rates(10.0, 10.0, 20.0, shared_cores=True))
    update = machine.submit(Resource.CPU, 2.0)
    compute = machine.run(1.0)
    machine.wait([update])
    assert (compute.end_s, update.end_s) == pytest.approx((2.0, 3.0))
    assert machine.stall_s[Resource.CPU] == pytest.approx(1.0)


def test_copies_and_updates_share_the_hosts_memory():
    rates = Rates(25.0, 25.0, 50.0, host_memory_bytes_per_s=40.0, worker_bytes_per_s=35.0)
    machine = Machine(rates)
    into, update = machine.submit(Resource.IN, 1.0), machine.submit(Resource.CPU, 2.0)
    compute = machine.run(0.5)
    machine.wait([into, update])
    # 60 are asked for and 40 there: two thirds of the speed until the copy is done, and the computes at full speed.
    assert (compute.end_s, into.end_s, update.end_s) == pytest.approx((0.5, 1.5, 2.5))
    alone = Machine(replace(rates, worker_bytes_per_s=80.0))
    assert alone.submit(Resource.CPU, 1.0) and alone.run(3.0)
    assert alone.submit(Resource.CPU, 1.0).number == 2
    alone.advance()
    assert alone.now == pytest.approx(5.0)  # even alone the work is limited by memory


def test_what_is_ready_goes_first():
    machine = Machine(Rates(10.0, 10.0, 20.0))
    update = machine.submit(Resource.CPU, 2.5)
    waiting = machine.submit(Resource.IN, 1.0, waits=[update])
    ready = [machine.submit(Resource.IN, 1.0) for _ in range(4)]
    machine.wait([waiting])
    # Two are done, the third is under way when the update ends; then the oldest comes first.
    assert [job.end_s for job in ready[:3]] == pytest.approx([1.0, 2.0, 3.0])
    assert (waiting.start_s, waiting.end_s) == pytest.approx((3.0, 4.0))
    assert machine.stall_s[Resource.CPU] == pytest.approx(2.5)
    assert machine.stall_s[Resource.IN] == pytest.approx(1.5)
    machine.wait(ready)
    assert ready[3].end_s == pytest.approx(5.0)


def test_management_delays_updates():
    base = tiny_schedule()
    managed = replace(base, rates=replace(base.rates, manage_s=0.5))
    validate(managed)
    # Two steps' management lies between the gradient's arrival and the end of the update.
    assert simulate(managed).step_s > simulate(base).step_s
