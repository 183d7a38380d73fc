"""Several micro-batches per update, in schedules written by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from offmate.solver import items
from offmate.solver.effects import resident_at
from offmate.solver.files import problem_from_dict
from offmate.solver.files import to_dict as problem_to_dict
from offmate.solver.problem import Problem, ProblemError
from offmate.solver.program.held import held_bytes
from offmate.solver.schedule import Schedule
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import Simulation, memory_highs, simulate
from offmate.solver.text import from_dict, to_dict, to_text

from .micro_schedule import BACKWARD, TURN_AROUND, micro_schedule
from .random_problems import random_problem
from .tiny_schedule import after, without


def with_gate(m: int, **changes: object) -> Problem:
    problem = replace(random_problem(random.Random(4)), gate=True, turn_around_steps=3)
    return replace(problem, micro_batches=m, **changes)  # type: ignore[arg-type]


def test_steps_go_on_through_three_passes_at_most() -> None:
    one, two, many = with_gate(1), with_gate(2), with_gate(7)
    assert (one.n_steps, two.n_steps, many.n_steps) == (9, 15, 21)
    assert many.passes == (0, 6, 12)
    assert [many.times(step) for step in (0, 6, 11, 12, 18)] == [1, 5, 5, 1, 1]
    assert {two.times(step) for step in range(15)} == {1}
    assert [many.block_of(step) for step in (5, 6, 8, 9, 17, 18)] == [0, 0, 2, 2, 0, None]
    assert many.first_turn_around == 18


def test_what_no_decision_changes_is_held_in_every_pass() -> None:
    once, twice = with_gate(1), with_gate(2)
    held, again = held_bytes(once), held_bytes(twice)
    assert again[6:] == held
    old = sum(output.bytes for output in once.outputs)
    # Outputs of the first pass last through the second's forwards; the rest of a pass ends with it.
    assert again[:3] == held[:3] and again[6] == held[0] and held[0] >= old


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"micro_batches": 2, "gate": False}, "more than one needs planned updates and a gate"),
        ({"gate": False, "gate_s": 1.0}, "there is no gate"),
        ({"gate_s": -1.0}, "gate_s is -1.0"),
    ],
)
def test_problems_that_cannot_be(change: dict[str, object], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        replace(with_gate(1), **change)  # type: ignore[arg-type]


def test_problems_survive_json_and_older_files_have_one_micro_batch() -> None:
    problem = with_gate(5, gate_s=0.5)
    data = json.loads(json.dumps(problem_to_dict(problem)))
    assert problem_from_dict(data) == problem
    for name in ("micro_batches", "gate_s"):
        del data[name]
    assert problem_from_dict(data) == with_gate(1)


def spans(simulation: Simulation) -> dict[str, tuple[float, float]]:
    return {str(e.action): (round(e.start_s, 6), round(e.end_s, 6)) for e in simulation.timeline}


def test_two_micro_batches_by_hand() -> None:
    # Forwards take 7 s, what goes out and in of them included; a backward 6 s, in the second pass 1/8 s more for the
    # addition. The first pass waits for w's gradient (1 s), the gate for its addition, too; u's state comes and goes.
    simulation = simulate(micro_schedule(2))
    times = spans(simulation)
    assert times["2 begin-total u"] == (11, 11)
    assert times["3 offload g:w"] == (13, 14)
    assert times["3 accumulate-cpu w"] == (14, 14)  # the first gradient is the total
    assert times["4 prefetch p:w"] == (14, 15)
    assert times["6 accumulate u"] == (25, 25.125)
    assert times["7 accumulate-cpu w"] == (28.125, 28.625)
    assert times["8 compute gate"] == (28.625, 28.875)
    assert times["8 update-device u"] == (32.875, 33.375)
    assert simulation.step_s == pytest.approx(37.375)


def test_middle_micro_batches_are_counted_and_not_walked() -> None:
    three, eight = simulate(micro_schedule(3)), simulate(micro_schedule(8))
    middle_s = 14.125  # as the last one
    assert three.step_s == pytest.approx(37.375 + middle_s)
    assert eight.step_s == pytest.approx(37.375 + 6 * middle_s)
    assert len(eight.timeline) == len(three.timeline)
    assert eight.peak_bytes == three.peak_bytes == 124
    assert eight.taken[-1][1] == pytest.approx(eight.step_s)
    # Every pass waits 4 s for what goes out, the last moment of an iteration 4 s for the state.
    assert eight.stall_s["copy out"] == pytest.approx(8 * 4 + 4)


def test_a_gradient_waits_for_the_last_but_one_to_be_added() -> None:
    slow = micro_schedule(4, add_cpu_s={"w": 20.0})
    validate(slow)
    times = spans(simulate(slow))
    # The first of an iteration is the total. The next two find both buffers empty; the additions follow each other.
    assert times["3 accumulate-cpu w"] == (14, 14)
    assert times["7 offload g:w"][1] == pytest.approx(28.125)
    assert times["7 accumulate-cpu w"] == (28.125, 48.125)
    assert times["11 offload g:w"][0] == pytest.approx(55.375)  # as soon as it is made
    assert times["11 accumulate-cpu w"] == (68.125, 88.125)
    slower = spans(simulate(replace(slow, add_cpu_s={"w": 50.0})))
    assert slower["7 accumulate-cpu w"][1] == slower["11 offload g:w"][0] == pytest.approx(78.125)


def test_small_gradients_wait_for_no_addition_where_a_large_one_has_made_room() -> None:
    slow = micro_schedule(4, add_cpu_s={"w": 50.0})
    assert spans(simulate(slow))["11 offload g:w"][0] == pytest.approx(78.125)  # after an addition
    sizes = slow.item_bytes | {items.gradient("u"): 4096}
    computes = slow.computes | {"B1": replace(slow.computes["B1"], rise_bytes=5000)}
    beside = replace(slow, item_bytes=sizes, computes=computes, device_budget_bytes=10_000)
    validate(beside)
    assert spans(simulate(beside))["11 offload g:w"][0] == pytest.approx(55.375)  # as soon as it is made


def test_totals_take_bytes_from_the_second_pass_on() -> None:
    schedule = micro_schedule(2)
    highs = dict(zip(map(str, schedule.actions), memory_highs(schedule)))
    assert highs["4 compute start"] == highs["0 compute start"] + 20
    assert highs["6 compute B1"] == highs["2 compute B1"] + 20
    assert highs["7 compute B0"] == highs["3 compute B0"]


@pytest.mark.parametrize("m", [2, 3, 8])
def test_what_is_there_when_a_micro_batch_starts(m: int) -> None:
    schedule = micro_schedule(m)
    validate(schedule)
    assert resident_at(schedule, 0) == schedule.resident == ("old:y", "p:u")
    assert all(resident_at(schedule, i) == ("old:y", "p:u", "t:u") for i in range(1, m))
    assert [schedule.pass_of(i).forward[0].step for i in range(m)] == [0, *[4] * (m - 2), 4 * min(m - 1, 2)]
    with pytest.raises(IndexError, match=f"{m} of {m}"):
        schedule.pass_of(m)
    assert from_dict(json.loads(json.dumps(to_dict(schedule)))) == schedule
    assert to_text(schedule).count("\n") == 2 + 2 * min(m, 3) + 1 + len(schedule.actions)


def one_pass_more(schedule: Schedule) -> Schedule:
    return replace(schedule, lead=(*schedule.lead, schedule.lead[-1]))


GATE_LATE = after(without(TURN_AROUND, "4 compute gate"), "4 free t:u", "4 compute gate")
ADDED_FIRST = after(without(BACKWARD, "3 accumulate-cpu w"), "3 compute B0", "3 accumulate-cpu w")
ADDED_LATE = after(TURN_AROUND, "4 compute gate", "4 accumulate-cpu w", "4 accumulate-cpu w")

BROKEN = {
    "no gate": (micro_schedule(2, gate=False), "needs a gate"),
    "no micro-batch": (micro_schedule(2, micro_batches=0), "is 0, must be at least 1"),
    "a pass too many": (one_pass_more(micro_schedule(3)), "3 micro-batches need 2"),
    "a gradient lost": (
        micro_schedule(2, backward=without(BACKWARD, "3 accumulate-cpu w")),
        "accumulate-cpu w: announced, but no action does it",
    ),
    "a gradient that is released": (
        micro_schedule(2, backward=after(BACKWARD, "2 compute B1", "2 free g:u")),
        "free g:u: the gradient is neither used|no complete g:u is on the device to be added",
    ),
    "a total that is released": (
        micro_schedule(2, backward=after(BACKWARD, "2 accumulate u", "2 free t:u")),
        "accumulate u: t:u is not on the device",
    ),
    "a total that stays": (
        micro_schedule(2, turn_around=without(TURN_AROUND, "4 free t:u")),
        "end of the iteration, t:u",
    ),
    "an update before the gate": (
        micro_schedule(2, turn_around=GATE_LATE),
        "update-cpu w: updates before the last backward has ended",
    ),
    "an update in every micro-batch": (
        micro_schedule(2, backward=after(BACKWARD, "3 accumulate-cpu w", "3 update-cpu w")),
        "updates before the last backward has ended",
    ),
    "a middle pass that leaves more than it found": (
        micro_schedule(3, backward=without(BACKWARD, "3 free x:m")),
        "x:m",
    ),
    "an addition of what was not sent": (
        micro_schedule(2, backward=ADDED_FIRST),
        "accumulate-cpu w: the gradient was not sent",
    ),
    "an addition too late": (
        micro_schedule(2, backward=without(BACKWARD, "3 accumulate-cpu w"), turn_around=ADDED_LATE),
        "gradient of w again before it was added",
    ),
    "added here and updated there": (
        micro_schedule(2, add_cpu_s={}, add_device_s={"u": 0.1, "w": 0.1}),
        "no such name|announced",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_schedule_broken_in_one_way_is_refused(case: str) -> None:
    schedule, message = BROKEN[case]
    with pytest.raises(ScheduleError, match=message):
        validate(schedule)
