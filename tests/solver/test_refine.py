"""The search for a schedule: passes only ever make it faster, and say what they gained."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import pytest
from offmate.solver.plan import plan
from offmate.solver.refine import Candidate, Gain, Limits, Search, candidate, refine
from offmate.solver.refinements import LADDER, Improve, OtherSteps
from offmate.solver.rounding.groups import round_solution
from offmate.solver.scheduling.emit import build_schedule
from offmate.solver.simulate import keeps_budgets, simulate
from offmate.solver.solution import Solution, Status
from offmate.solver.solve import solve

from ..golden.problems import problem_of
from .random_problems import gated, random_problem
from .tiny_schedule import BACKWARD, after, tiny_schedule

ANSWER = Solution(Status.OPTIMAL, 5.0, 5.0, 0.0, 0.0)
SCHEDULE = tiny_schedule()


def found(step_s: float) -> Candidate:
    return Candidate(ANSWER, SCHEDULE, SCHEDULE, step_s)


def search(*steps_s: float) -> Search:
    return Search(problem_of(0), problem_of(0), ANSWER, Limits(), tuple(map(found, steps_s)))


@dataclass(frozen=True)
class Gives:
    """A pass that gives these seconds one by one while more than a part is lost."""

    steps_s: tuple[float, ...]
    worth: float = 0.1
    name: str = "gives"

    def accepts(self, search: Search) -> bool:
        return search.loses(self.worth)

    def candidates(self, search: Search) -> Iterator[Candidate]:
        yield from map(found, self.steps_s)


def test_a_pass_goes_on_until_what_is_found_is_good_enough() -> None:
    gains: list[Gain] = []
    best = refine(search(9.0), (Gives((8.0, 5.4, 5.0)), Gives((1.0,))), gains.append)
    assert best.best.step_s == 5.4 and [one.step_s for one in best.found] == [9.0, 8.0, 5.4]
    assert [(gain.before_s, gain.after_s, gain.schedules) for gain in gains] == [(4.0, pytest.approx(0.4), 2)]


def test_what_is_slower_is_not_taken() -> None:
    gains: list[Gain] = []
    assert refine(search(6.0), (Gives((7.0, 8.0)),), gains.append).best.step_s == 6.0
    assert (gains[0].before_s, gains[0].after_s) == (1.0, 1.0)


def test_a_schedule_that_breaks_a_rule_is_never_the_best() -> None:
    broken = tiny_schedule(backward=after(BACKWARD, "2 prefetch s:u", "2 prefetch s:u"))
    assert candidate(ANSWER, SCHEDULE, broken).step_s == inf
    assert replace(search(7.0), found=(candidate(ANSWER, SCHEDULE, broken), found(7.0))).best.step_s == 7.0


@pytest.mark.parametrize("seed", [1, 5, 17, 23])
def test_without_passes_the_schedule_is_algorithm_1s(seed: int) -> None:
    problem = problem_of(seed)
    alone = plan(problem, ladder=())
    assert alone.schedule == build_schedule(problem, round_solution(problem, solve(problem)))
    assert [gain.name for gain in alone.gains] == ["algorithm 1"] and alone.gains[0].before_s == inf


@pytest.mark.parametrize("seed", range(4))
def test_every_pass_added_makes_a_plan_no_slower(seed: int) -> None:
    problem, best_s = problem_of(seed), inf
    for length in range(len(LADDER) + 1):
        planned = plan(problem, ladder=LADDER[:length])
        if planned.schedule is None:
            return
        assert planned.simulation is not None
        assert planned.simulation == simulate(planned.schedule)
        assert planned.simulation.step_s <= best_s * (1 + 1e-9)
        best_s = planned.simulation.step_s
        assert planned.rounding_loss_s == pytest.approx(best_s - planned.solution.objective_s)


def test_gains_are_reported_as_they_are_found() -> None:
    gains: list[Gain] = []
    planned = plan(problem_of(1), report=gains.append)
    assert planned.gains == tuple(gains) and [gain.name for gain in gains][:2] == ["algorithm 1", Improve().name]
    assert all(gain.after_s <= gain.before_s for gain in gains)
    assert all(one.after_s == two.before_s for one, two in pairwise(gains))


@pytest.mark.parametrize("seed", [3, 7, 11])
@pytest.mark.parametrize("shares", [(0.5,), (2.0,)])
def test_plans_of_other_turn_around_steps_are_valid_in_the_problems_own(seed: int, shares: tuple[float, ...]) -> None:
    rng = random.Random(seed)
    problem = replace(gated(random_problem(rng), rng, 1), turn_around_steps=6)
    alone = plan(problem, ladder=())
    if alone.schedule is None:
        return
    rounded = Candidate(alone.solution, alone.schedule, alone.schedule, inf)
    others = list(OtherSteps(shares=shares).candidates(Search(problem, problem, alone.solution, Limits(), (rounded,))))
    for one in others:
        assert one.step_s == simulate(one.schedule).step_s < inf
        assert keeps_budgets(problem, one.schedule)
        assert {action.step for action in one.schedule.turn_around} <= set(range(problem.n_steps))
    assert others


def test_other_turn_around_steps_are_tried_behind_a_gate_for_one_micro_batch() -> None:
    for gate, micro_batches, tried in ((True, 1, True), (True, 2, False), (False, 1, False)):
        problem = replace(problem_of(0), gate=gate, gate_s=0.0, micro_batches=micro_batches)
        assert OtherSteps().accepts(replace(search(9.0), problem=problem)) is tried
