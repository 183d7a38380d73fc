"""Whole choices near a relaxation, and that they spare the search a tree."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from offmate.solver import backends
from offmate.solver.answer import RawAnswer
from offmate.solver.instances.synthetic import Shape, Speeds, llama
from offmate.solver.linear import LinearModel, evaluate, relaxed
from offmate.solver.problem import Problem, Rates
from offmate.solver.program.model import Program, state_program
from offmate.solver.program.search import most_used, nearest_sums, search
from offmate.solver.solution import Status

from ..random_problems import random_problem
from .test_program import option, problem_of

WAYS = pytest.mark.parametrize("whole_choices", [nearest_sums, most_used])


def relaxation(problem: Problem) -> tuple[Program, RawAnswer]:
    program = state_program(problem)
    return program, backends.default().solve(relaxed(program.model), 60.0, 0.01)


def saved_bytes(problem: Problem, program: Program, value: Callable[[int], float]) -> list[float]:
    """Bytes saved by all blocks up to each, by the parts of their options."""
    sums, total = [], 0.0
    for block, choices in zip(problem.blocks, program.choices):
        parts = {o: sum(value(c) for c in terms) for o, terms in choices.columns.items()}
        total += sum(block.options[o].saved_bytes * part for o, part in parts.items())
        sums.append(total)
    return sums


@WAYS
@pytest.mark.parametrize("seed", range(5))
def test_every_block_runs_with_one_option(whole_choices: Callable, seed: int) -> None:
    problem = random_problem(random.Random(seed), n_blocks=5)
    program, answer = relaxation(problem)
    chosen = whole_choices(problem, program, answer.values)
    assert chosen.keys() == {c for c, whole in enumerate(program.model.integer) if whole}
    assert set(chosen.values()) <= {0.0, 1.0}
    for block in program.choices:
        assert sum(chosen[c] for terms in block.columns.values() for c in terms) == 1.0


@WAYS
@pytest.mark.parametrize("budget", [150, 250, 420])
def test_no_run_of_blocks_saves_more_than_the_fractions(whole_choices: Callable, budget: int) -> None:
    ways = [option("keep", 100), option("recompute", 0, backward_s=3.0)]
    problem = problem_of(6, options=ways, budget=budget)
    program, answer = relaxation(problem)
    chosen = whole_choices(problem, program, answer.values)
    whole = saved_bytes(problem, program, chosen.__getitem__)
    fractions = saved_bytes(problem, program, answer.values.__getitem__)
    assert all(w <= f + 1 for w, f in zip(whole, fractions))
    assert sum(fractions) - sum(whole) < 6 * 100


@pytest.mark.parametrize("budget_bytes", [3 * 10**9, 6 * 10**9])
def test_a_deep_chain_needs_no_tree(budget_bytes: int) -> None:
    """Blocks whose saved values take a large part of the device: what they offload leaves over several steps."""
    rates = Rates(10.4e9, 10.4e9, 16.6e9, 0.001)
    shape = Shape(12, 4096, 11008, 32000, batch=4, sequence=512, attention_heads=32)
    problem = llama(
        shape, Speeds(6.5e12, 3e11, 1.1e9, 16.6e9, rates), budget_bytes, 10**13, activation_bytes=15 * 10**9
    )
    program, solved = state_program(problem), []

    class Counted:
        def solve(self, model: LinearModel, *given: object, **more: object) -> RawAnswer:
            solved.append(any(model.integer))
            return backends.default().solve(model, *given, **more)  # type: ignore[arg-type]

    answer = search(problem, program, Counted(), 60.0, 0.01)  # type: ignore[arg-type]
    assert answer.status is Status.OPTIMAL
    assert solved in ([False, False], [False, False, False])
    assert sum(evaluate(t, answer.values) for t in program.time) > 0
