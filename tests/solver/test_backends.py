"""Each backend by itself: what it must not believe, what it says when it is absent, what is left without time."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest
from offmate.solver import backends
from offmate.solver.backends import BackendError, highs
from offmate.solver.linear import ONE, Builder, LinearModel, add, holds
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, Rates
from offmate.solver.schedule import Kind
from offmate.solver.scheduling.validate import validate
from offmate.solver.solution import Status
from offmate.solver.solve import solve

from .program.test_program import option, problem_of, trained
from .random_problems import random_problem

BACKENDS = pytest.mark.parametrize("backend", ["highs", "cbc"])


def far_apart() -> Problem:
    """Blocks that run for microseconds, groups that the host updates in minutes: HiGHS's interior point is lost."""
    groups = [trained(f"w{i}", (i, 3 - i), (3 - i,), 30, 15, 10**7, cpu_s=100.0, device_s=1e-3) for i in range(2)]
    ways = [option("keep", 8000, forward_s=5e-5, backward_s=6e-7, peak=10)]
    ways.append(option("again", 0, forward_s=1e-3, backward_s=8e-3, peak=10))
    return problem_of(2, groups, options=ways, budget=10**11, host=10**11, rates=Rates(5e5, 2e8, 6e6))


def at_least_one() -> LinearModel:
    """Minimise x under x >= 1."""
    builder = Builder()
    x = builder.column("x", 10.0)
    builder.at_most_zero("least", add((1.0, {ONE: 1.0}), (-1.0, x)))
    return builder.freeze(x)


@BACKENDS
def test_seconds_far_apart_are_planned(backend: str) -> None:
    solution = solve(far_apart(), gap=1e-6, backend=backend)
    assert solution.status is Status.OPTIMAL
    assert solution.objective_s == pytest.approx(2 * (5e-5 + 6e-7 + 1e-3), rel=1e-3)


def test_a_refusal_by_an_interior_point_is_asked_again_by_simplex(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    run, refused = highs._run, highs._refused
    monkeypatch.setattr(highs, "_run", lambda h, limit_s, more: (asked.append(more), run(h, limit_s, more)))
    monkeypatch.setattr(highs, "_refused", lambda h: len(asked) == 1 or refused(h))
    assert highs.solve(at_least_one(), 10.0, 0.0).values == (1.0,)
    assert asked == [highs.INTERIOR, highs.SIMPLEX]


def test_a_point_that_breaks_the_rows_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = at_least_one(), []
    told = highs._answer

    def wrong_at_first(*given: object) -> highs.RawAnswer:
        answer = told(*given)  # type: ignore[arg-type]
        asked.append(answer)
        return replace(answer, values=(0.0,), objective=0.0) if len(asked) == 1 else answer

    monkeypatch.setattr(highs, "_answer", wrong_at_first)
    answer = highs.solve(model, 10.0, 0.0)
    assert len(asked) == 2
    assert answer.values == (1.0,)


def test_a_plan_of_zero_seconds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told = highs._answer

    def nothing(model: LinearModel, *given: object) -> highs.RawAnswer:
        answer = told(model, *given)  # type: ignore[arg-type]
        return replace(answer, values=(0.0,) * len(model.upper), objective=0.0)

    monkeypatch.setattr(highs, "_answer", nothing)
    problem = random_problem(random.Random(3))
    assert solve(problem, backend="highs").status is Status.NO_ANSWER
    planned = plan(problem, backend="highs")
    assert planned.solution.status is Status.STREAMED
    assert planned.simulation is not None and planned.simulation.step_s > 0


def test_what_a_point_may_lack() -> None:
    model = at_least_one()
    assert holds(model, (1.0,)) and holds(model, (1.0 - 1e-6,))
    assert not holds(model, (0.9,)) and not holds(model, (float("nan"),))


@BACKENDS
@pytest.mark.parametrize("micro_batches", [0, 3])
def test_without_time_everything_streams(backend: str, micro_batches: int) -> None:
    problem = random_problem(random.Random(3))
    if micro_batches:
        problem = replace(problem, gate=True, turn_around_steps=3, micro_batches=micro_batches)
    planned = plan(problem, time_limit_s=0.0, backend=backend)
    assert planned.solution.status is Status.STREAMED
    assert "streams everything" in planned.solution.status.value
    assert planned.schedule is not None
    validate(planned.schedule)
    assert all(action.kind is not Kind.UPDATE_DEVICE for action in planned.schedule.actions)


@pytest.mark.parametrize(("name", "words"), [("highs", "highspy"), ("cbc", "pulp")])
def test_an_absent_solver_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.setitem(sys.modules, words, None)
    for loaded in ("highs", "cbc", "answer"):
        monkeypatch.delitem(sys.modules, f"{backends.__name__}.{loaded}", raising=False)
    with pytest.raises(BackendError, match=rf"{words} is not installed; it .*Try: pip install .*{words}"):
        solve(random_problem(random.Random(3)), backend=name)


def test_where_highs_is_absent_cbc_solves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    monkeypatch.delitem(sys.modules, f"{backends.__name__}.highs", raising=False)
    backends._say_once.cache_clear()
    assert backends.default() is backends.default() is backends.get("cbc")
    assert [record.message.count("Until then CBC solves") for record in caplog.records] == [1]
    assert solve(random_problem(random.Random(3))).status is Status.OPTIMAL
