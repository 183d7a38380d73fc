"""A problem that contradicts itself is refused, and the message names the row and the value."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from offmate.solver.problem import Problem, ProblemError, Shared, Value
from offmate.solver.program.held import held_bytes

from .random_problems import random_problem


@pytest.fixture
def problem() -> Problem:
    return random_problem(random.Random(1), n_blocks=3)


def _first_group(problem: Problem, **changes: object) -> Problem:
    return replace(problem, groups=(replace(problem.groups[0], **changes), *problem.groups[1:]))  # type: ignore[arg-type]


def _first_option(problem: Problem, **changes: object) -> Problem:
    block = problem.blocks[0]
    option = replace(block.options[0], **changes)  # type: ignore[arg-type]
    return replace(problem, blocks=(replace(block, options=(option,)), *problem.blocks[1:]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: replace(p, blocks=()), ["at least one block"]),
        (lambda p: replace(p, turn_around_steps=1), ["turn_around_steps", "1"]),
        (lambda p: replace(p, device_budget_bytes=-1), ["device_budget_bytes", "-1"]),
        (lambda p: replace(p, device_budget_bytes=float("inf")), ["device_budget_bytes", "inf"]),
        (lambda p: replace(p, host_budget_bytes=1.5), ["host_budget_bytes", "1.5", "whole number"]),
        (lambda p: replace(p, start_s="1"), ["start_s", "'1'", "number"]),
        (lambda p: replace(p, blocks=(replace(p.blocks[0], options=()), *p.blocks[1:])), ["block0", "no options"]),
        (lambda p: replace(p, rates=replace(p.rates, in_bytes_per_s=0.0)), ["in_bytes_per_s", "above 0"]),
        (lambda p: replace(p, rates=replace(p.rates, manage_s=float("nan"))), ["manage_s", "nan"]),
        (lambda p: _first_option(p, saved_bytes=-7), ["block0", "keep", "saved_bytes", "-7"]),
        (lambda p: _first_option(p, forward_s=float("inf")), ["block0", "forward_s", "inf"]),
        (lambda p: _first_group(p, uses=()), ["embedding", "no step"]),
        (lambda p: _first_group(p, uses=(3, 1)), ["embedding", "(3, 1)"]),
        (lambda p: _first_group(p, uses=(0, 6)), ["embedding", "0..5"]),
        (lambda p: _first_group(p, grad_steps=(2,)), ["embedding", "grad_steps", "3..5"]),
        (lambda p: _first_group(p, tensors=()), ["embedding", "no tensors"]),
        (lambda p: replace(p, values=(Value("h", 8, 3, (4,)),)), ["value h", "step 3"]),
        (lambda p: replace(p, values=(Value("h", 8, 1, (1,)),)), ["value h", "uses", "2..5"]),
        (lambda p: replace(p, values=(Value("h", 8, 1, ()),)), ["value h", "no step"]),
        (lambda p: replace(p, shared=(Shared("mask", 8, 99),)), ["mask", "99"]),
    ],
)
def test_contradictions_are_named(problem: Problem, change, words: list[str]) -> None:
    with pytest.raises(ProblemError) as refused:
        change(problem)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_steps_and_blocks(problem: Problem) -> None:
    assert [problem.backward_step(i) for i in range(3)] == [5, 4, 3]
    assert [problem.block_of(t) for t in range(7)] == [0, 1, 2, 2, 1, 0, None]


def test_held_bytes_by_hand() -> None:
    from offmate.solver.problem import Output

    from .program.test_program import problem_of

    problem = problem_of(
        n=2,
        values=(Value("h", 10, 0, (1, 2), 10, (2,)),),
        shared=(Shared("mask", 1, 3),),
        outputs=(Output("y", 100, 0, 1000),),
    )
    # the mask; the last y in both forwards; this y from step 1; its gradient in B1 only, as B0 consumes it
    assert held_bytes(problem) == [101, 201, 1101, 101, 100, 100]
