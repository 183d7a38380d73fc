"""Steps as data: which block runs in which step, and for which micro-batches."""

import pytest
from offmate.solver.steps import Direction, passes_of, steps_of


@pytest.mark.parametrize(
    "micro_batches, passes",
    [(1, ((0, 1),)), (2, ((0, 1), (1, 2))), (3, ((0, 1), (1, 2), (2, 3))), (8, ((0, 1), (1, 7), (7, 8)))],
)
def test_one_middle_pass_stands_for_all(micro_batches, passes):
    assert passes_of(micro_batches) == passes


def test_every_block_runs_forward_and_backward_in_every_pass():
    steps = steps_of(3, micro_batches=5, turn_around_steps=2)
    forwards = [step.block for step in steps if step.direction is Direction.FORWARD]
    backwards = [step.block for step in steps if step.direction is Direction.BACKWARD]
    assert forwards == [0, 1, 2] * 3
    assert backwards == [2, 1, 0] * 3
    assert [step.block for step in steps[-2:]] == [None, None]
    assert [step.of_pass for step in steps] == [0] * 6 + [1] * 6 + [2] * 6 + [2] * 2
    assert sum(step.times for step in steps if step.block == 0) == 2 * 5
