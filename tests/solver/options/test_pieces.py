"""States in pieces: where they are cut, what rounding moves of them, and what a schedule of them must keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from offmate.solver.decisions import StateStay, state_parts
from offmate.solver.files import problem_from_dict, to_dict
from offmate.solver.options.pieces import Grid, in_pieces
from offmate.solver.problem import Block, Group, Option, Problem, ProblemError, Rates, TensorSize
from offmate.solver.rounding.groups import round_solution
from offmate.solver.scheduling.emit import build_schedule
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import simulate
from offmate.solver.solution import ActivationFlow, GroupFlow, Solution, Status
from offmate.solver.text import from_dict
from offmate.solver.text import to_dict as schedule_to_dict

from ..tiny_schedule import BACKWARD, after, tiny_schedule, without

MIB = 1 << 20
CUT = TensorSize("w", 100, 100, 200, rows=10, piece_rows=3)


def one_group(tensor: TensorSize) -> Problem:
    blocks = tuple(Block(f"b{i}", (Option("keep", 0, 0, 1.0, 1.0, 1, 1000),)) for i in range(2))
    group = Group("w", (tensor,), (1, 2), (2,), cpu_update_s=1.0, device_update_s=0.1)
    return Problem(blocks, (group,), (), (), (), Rates(100.0, 100.0, 200.0), 10_000, 10_000)


def cut(state_bytes: int, grid: Grid, others_bytes: int = 0) -> tuple[int, int]:
    """Rows, and those of a piece, of a tensor with such a state beside others that stay whole."""
    tensors = (TensorSize("w", 1, 1, state_bytes), TensorSize("others", 1, 1, others_bytes))
    (group,) = in_pieces([Group("w", tensors, (0, 1), (1,))], {"w": grid})
    assert group.tensors[1] == tensors[1]
    return group.tensors[0].rows, group.tensors[0].piece_rows


def test_a_piece_is_an_eight_hundredth_of_all_states_and_a_few_mebibytes_at_least() -> None:
    assert cut(80 * MIB, Grid(1280)) == (1280, 64)  # 20 pieces of 4 MiB
    assert cut(1000 * MIB, Grid(1000), 7000 * MIB) == (1000, 10)  # 100 of 10 MiB
    assert cut(4 * MIB, Grid(1024)) == (1, 1)
    assert cut(80 * MIB, Grid(1)) == (1, 1)
    assert cut(80 * MIB, Grid(1280, every=60)) == (1280, 120)
    assert cut(80 * MIB + 1, Grid(1280)) == (1, 1)  # not alike


def test_pieces_by_hand() -> None:
    assert CUT.pieces == ((0, 3), (3, 6), (6, 9), (9, 10))
    assert [CUT.piece_bytes(rows) for rows in CUT.pieces] == [60, 60, 60, 20]
    assert TensorSize("w", 100).pieces == ((0, 1),)
    with pytest.raises(ProblemError, match="tensor w: a state of 200 bytes cannot be cut into 7 equal rows"):
        one_group(replace(CUT, rows=7))
    with pytest.raises(ProblemError, match="piece_rows is 0"):
        one_group(replace(CUT, piece_rows=0))


def test_a_file_that_says_nothing_of_pieces_has_whole_states() -> None:
    whole = one_group(TensorSize("w", 100, 100, 200))
    data = to_dict(whole)
    for name in ("rows", "piece_rows"):
        del data["groups"][0]["tensors"][0][name]
    assert problem_from_dict(data) == whole
    assert problem_from_dict(to_dict(one_group(CUT))) == one_group(CUT)


def rounded(tensor: TensorSize, part: float):
    flows = {"w": GroupFlow(state_out={2: part}, state_in={1: part})}
    solution = Solution(Status.OPTIMAL, 4.0, 4.0, 0.0, 0.0, (0, 0), (ActivationFlow(),) * 2, groups=flows)
    return round_solution(one_group(tensor), solution)


def test_no_more_pieces_leave_than_the_fractions_need() -> None:
    """0.35 of 200 is 70: the subset that reaches it with least is 60 and 20."""
    decisions = rounded(CUT, 0.35)
    (plan,) = decisions.tensors
    assert plan.states == (StateStay((0, 3), 2, 1), StateStay((9, 10), 2, 1))
    assert [(part.item, part.bytes) for part in state_parts(CUT, plan)] == [
        ("s:w[0:3]", 60), ("s:w[3:9]", 120), ("s:w[9:10]", 20),
    ]  # fmt: skip
    schedule = build_schedule(one_group(CUT), decisions)
    validate(schedule)
    lines = [str(action) for action in schedule.actions]
    assert "2 offload s:w[0:3]" in lines and "1 prefetch s:w[9:10]" in lines
    assert not any("s:w[3:9]" in line for line in lines) and "s:w[3:9]" in schedule.resident
    assert schedule.host_bytes == 100 + 200  # the parameter, and the whole state, to whose place in it pieces leave
    assert from_dict(schedule_to_dict(schedule)) == schedule


def test_what_does_not_move_or_moves_whole_is_one_item() -> None:
    assert "s:w" in build_schedule(one_group(CUT), rounded(CUT, 0.0)).resident
    whole = TensorSize("w", 100, 100, 200)
    lines = [str(action) for action in build_schedule(one_group(whole), rounded(whole, 0.35)).actions]
    assert "2 offload s:w" in lines


def test_a_tensor_whose_name_looks_like_a_piece_is_whole() -> None:
    sizes = {"p:w": 1, "s:w[2:10]": 32, "s:w[0:2]": 8, "p:u[0:2]": 1, "s:u[0:2][:]": 4}
    schedule = tiny_schedule(item_bytes=sizes)
    assert schedule.states == {"w": ("s:w[0:2]", "s:w[2:10]"), "u[0:2]": ("s:u[0:2][:]",)}
    assert [item.rows for item in schedule.item_bytes] == [None, (2, 10), (0, 2), None, None]


def in_two(text: str) -> str:
    """Lines of the tiny schedule with u's state in two pieces."""
    lines = text.strip().splitlines()
    return "\n".join(
        one for line in lines for one in ([f"{line}[0:1]", f"{line}[1:2]"] if line.endswith("s:u") else [line])
    )


def tiny_in_two(backward: str, **changes):
    sizes = {item: size for item, size in tiny_schedule().item_bytes.items() if item != "s:u"}
    return tiny_schedule(
        backward=backward, item_bytes=sizes | {"s:u[0:1]": 20, "s:u[1:2]": 20}, host_bytes=90, **changes
    )


def test_an_update_waits_for_all_pieces() -> None:
    schedule = tiny_in_two(in_two(BACKWARD))
    validate(schedule)
    assert simulate(schedule).step_s == pytest.approx(simulate(tiny_schedule()).step_s)
    late = without(in_two(BACKWARD), "2 prefetch s:u[1:2]")
    with pytest.raises(ScheduleError, match=r"update-device u: reads s:u\[1:2\], which is not on the device"):
        validate(tiny_in_two(after(late, "2 update-device u", "2 prefetch s:u[1:2]")))
    with pytest.raises(ScheduleError, match=r"prefetch s:u\[0:1\]: it was not sent to the host before"):
        validate(tiny_in_two(without(in_two(BACKWARD), "2 offload s:u[0:1]")))
