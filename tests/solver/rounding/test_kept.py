"""Pieces of states stay on the device where there is room, and those that leave to RAM make room for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from offmate.solver.decisions import StateStay, TensorPlan, tensor_bytes
from offmate.solver.problem import Problem
from offmate.solver.rounding.kept import keep

from .test_rounding import one_group, trainable

SHORT = StateStay((0, 1), 2, 5, "drive")  # away in steps 3 and 4
LONG = StateStay((0, 1), 2, 1, "drive")  # away in all but 2 and 1


def kept(spare: list[float]) -> tuple[Problem, set[str]]:
    """The tensors, of 200, 120 and 80 bytes of state, whose states stay: w0 is away for short, the others for long."""
    problem = one_group(trainable(100, 60, 40))
    plans = [TensorPlan(f"w{i}", "w", device_update=2, states=(LONG if i else SHORT,)) for i in range(3)]
    found = keep(problem, plans, spare)
    for step in range(problem.n_steps):
        used = [
            sum(tensor_bytes(problem, problem.groups[0], t, one[t.name])[step] for t in problem.groups[0].tensors)
            for one in ({plan.name: plan for plan in plans}, found)
        ]
        assert used[1] - used[0] <= spare[step]
    return problem, {name for name, plan in found.items() if not plan.states}


@pytest.mark.parametrize(
    "room, staying",
    [({}, set()), ({3: 200, 4: 200}, {"w0"}), ({3: 199, 4: 200}, set())],
)
def test_a_piece_stays_where_all_of_it_has_room(room, staying):
    problem, found = kept([0.0] * 7)
    assert not found and problem.n_steps == 7
    assert kept([float(room.get(step, 0)) for step in range(7)])[1] == staying


def test_room_is_used_once_and_first_by_what_is_away_for_the_fewest_steps():
    assert kept([200.0] * 7)[1] == {"w0"}, "the others have room in steps 5 to 0 only"
    assert kept([320.0] * 7)[1] == {"w0", "w1"}
    assert kept([280.0] * 7)[1] == {"w0", "w2"}


def test_what_leaves_to_ram_is_away_for_as_long_as_it_can_be_and_lets_others_stay():
    problem = one_group(trainable(100, 60, 40), turn_around_steps=4)
    assert problem.n_steps == 8
    in_ram = StateStay((0, 1), 5, 7)  # away in step 6, its update is in step 2
    in_file = StateStay((0, 1), 3, 6, "drive")  # away in steps 4 and 5
    plans = [TensorPlan(f"w{i}", "w", device_update=2, states=(stay,)) for i, stay in enumerate((in_ram, in_file))]
    found = keep(problem, plans, [0.0] * 8)
    assert found["w0"].states == (replace(in_ram, out=4),), "soon after its update, until shortly before the next one"
    assert found["w1"].states == (in_file,), "nothing makes room for it in step 4"
    later = replace(in_file, out=4)
    found = keep(problem, [plans[0], replace(plans[1], states=(later,))], [0.0] * 8)
    assert found["w1"].states == (), "step 5 has room now"
