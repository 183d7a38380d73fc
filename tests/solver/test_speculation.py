"""Updates on the host may start before the gate: they keep a log, and their values leave behind the gate only."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import takewhile

import pytest
from offmate.solver.effects import with_actions
from offmate.solver.files import problem_from_dict
from offmate.solver.files import to_dict as problem_to_dict
from offmate.solver.instances.synthetic import speculating
from offmate.solver.missed import missed
from offmate.solver.plan import plan
from offmate.solver.problem import Block, Group, Option, Problem, ProblemError, Rates, TensorSize
from offmate.solver.resources import Resource
from offmate.solver.schedule import Action, Kind, Schedule
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import simulate
from offmate.solver.solve import least_budget, solve
from offmate.solver.text import from_dict, to_dict

from .random_problems import gated, in_rows, limited, random_problem


def chain(log_s: float = 0.1, cpu_s: float = 0.9, n: int = 3) -> Problem:
    """Blocks of a second per forward and two per backward, updated by the host in `cpu_s`, or with a log in more."""
    option = Option("keep", 0, 0, 1.0, 2.0, 0, 100)
    groups = tuple(
        Group(
            f"g{i}", (TensorSize(f"w{i}", 100, 100, 200),), (i, 2 * n - 1 - i), (2 * n - 1 - i,), cpu_s, 100.0,
            cpu_log_s=log_s,
        )
        for i in range(n)
    )  # fmt: skip
    blocks = tuple(Block(f"b{i}", (option,)) for i in range(n))
    rates = Rates(1e3, 1e3, 1e3)
    return Problem(blocks, groups, (), (), (), rates, 10**6, 10**6, gate=True, speculates=True)


def scheduled(problem: Problem) -> Schedule:
    found = plan(problem, gap=1e-6).schedule
    assert found is not None
    return found


def early(schedule: Schedule) -> list[Action]:
    return [action for action in schedule.actions if action.kind is Kind.SPECULATE_CPU]


def test_backwards_hide_the_updates_of_the_last_blocks() -> None:
    """9 s of computes. Behind the gate, updates of w0 and w1 are not hidden; before it, only that of w0 is not."""
    assert solve(replace(chain(), speculates=False), gap=1e-6).objective_s == pytest.approx(9.0 + 1.8, rel=1e-2)
    speculated_s = 9.0 + 0.1 + 0.9  # the copy of the gradient of w0, too
    assert solve(chain(), gap=1e-6).objective_s == pytest.approx(speculated_s, rel=1e-2)
    schedule = scheduled(chain())
    assert "w1" in {action.name for action in early(schedule)}
    assert simulate(schedule).step_s == pytest.approx(9.9 + 0.4, abs=0.3)


def test_a_log_takes_seconds_of_the_cpu() -> None:
    """An update with its log takes 2.9 s, of which the backward behind it hides 2: as good as one behind the gate."""
    assert solve(chain(log_s=2.0), gap=1e-6).objective_s > 10.0
    schedule = scheduled(chain())
    span = next(s for s in simulate(schedule).timeline if s.action.kind is Kind.SPECULATE_CPU)
    assert span.end_s - span.start_s == pytest.approx(0.9 + 0.1)


def test_a_log_takes_bytes_of_the_host() -> None:
    """Of parameters and states, as long as it is needed where host memory is counted in time; gradients wait too."""
    certain, speculated = (scheduled(replace(chain(), speculates=s)) for s in (False, True))
    logs = sum(speculated.item_bytes[f"u:{action.name}"] for action in early(speculated))  # type: ignore[index]
    assert logs == 300 * len(early(speculated)) > 0
    assert speculated.host_bytes == certain.host_bytes + logs
    assert "u:w0" not in certain.item_bytes
    short = replace(chain(), host_budget_bytes=certain.host_bytes)
    assert solve(short, gap=1e-6).objective_s >= solve(chain(), gap=1e-6).objective_s
    assert scheduled(short).host_layout.used_bytes <= certain.host_bytes


def test_new_values_leave_behind_the_gate() -> None:
    schedule = scheduled(chain())
    names = {action.name for action in early(schedule)}
    before = list(takewhile(lambda a: a.name != "gate", (*schedule.backward, *schedule.turn_around)))
    assert not any(a.kind is Kind.PREFETCH and a.item.name in names for a in before)
    back = next(a for a in (*schedule.turn_around, *schedule.forward) if a.name == f"p:{min(names)}")
    forward, turn_around = (
        tuple(a for a in part if a is not back) for part in (schedule.forward, schedule.turn_around)
    )
    soon = with_actions(schedule, (forward, schedule.backward, (back, *turn_around)))
    with pytest.raises(ScheduleError, match="the host holds no copy of its new values"):
        validate(soon)


def test_what_the_validator_refuses() -> None:
    schedule = scheduled(chain())
    one = early(schedule)[0]
    parts = {name: tuple(a for a in getattr(schedule, name) if a is not one) for name in ("backward", "turn_around")}
    refused = {
        "not between the last micro-batch's backward and the gate": {**parts, "forward": (one, *schedule.forward)},
        "announced, but no action does it": parts,
        "says nothing of its seconds": {"log_cpu_s": {}},
        "there is no complete gradient": {**parts, "backward": (one, *parts["backward"])},
        "done twice": {"backward": (*schedule.backward, one)},
    }
    for why, changes in refused.items():
        with pytest.raises(ScheduleError, match=why):
            validate(replace(schedule, **changes))
    with pytest.raises(ProblemError, match="there is no gate"):
        replace(chain(), gate=False)


def cpu_s(schedule: Schedule) -> float:
    spans = (span for span in simulate(schedule).timeline if span.resource == Resource.CPU)
    return sum(span.end_s - span.start_s for span in spans)


def test_a_step_that_misses_puts_back_what_has_begun_and_makes_all_again() -> None:
    """The updates of w2 and w1 have begun when the gate opens: each takes 0.1 s to undo and 0.9 s again."""
    schedule = scheduled(chain())
    again = missed(schedule)
    assert early(again) == early(schedule) and {action.name for action in early(again)} == {"w1", "w2"}
    assert cpu_s(again) == pytest.approx(cpu_s(schedule) + 2 * (0.1 + 0.9))
    assert simulate(again).step_s == pytest.approx(simulate(schedule).step_s + 2.0, abs=0.3)


def test_what_has_not_begun_when_the_gate_opens_needs_no_undoing() -> None:
    """Updates take 5 s instead: one has begun, and is undone; the other is made behind the gate only, with no log."""
    schedule = scheduled(chain())
    schedule = replace(schedule, update_cpu_s=dict.fromkeys(schedule.update_cpu_s, 5.0))
    again = missed(schedule)
    assert len(early(again)) == 1 and len(early(schedule)) == 2
    assert cpu_s(again) == pytest.approx(cpu_s(schedule) + (0.1 + 5.0) - 0.1)


def test_files_name_it_only_where_it_is() -> None:
    problem, schedule = chain(), scheduled(chain())
    assert problem_from_dict(problem_to_dict(problem)) == problem
    assert from_dict(to_dict(schedule)) == schedule
    plain = replace(problem, speculates=False, groups=tuple(replace(g, cpu_log_s=0.0) for g in problem.groups))
    data = problem_to_dict(plain)
    assert "speculates" not in data and "cpu_log_s" not in data["groups"][0]
    assert "log_cpu_s" not in to_dict(scheduled(plain))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(8))
def test_random_plans_are_valid_and_no_slower(seed: int) -> None:
    """In fractions. Schedules of whole tensors keep all rules, host memory included where little is left."""
    rng = random.Random(seed)
    free = random_problem(rng, n_blocks=rng.choice([2, 3, 4]), tied=rng.random() < 0.4)
    problem = gated(free, rng, (1, 1, 2, 4)[seed % 4])
    problem = in_rows(problem) if seed % 3 == 0 else limited(problem, rng) if seed % 3 == 1 else problem
    problem = replace(problem, host_in_time=seed % 2 == 0)
    problem = replace(problem, device_budget_bytes=int(1.3 * least_budget(problem).bytes))
    certain, speculated = solve(problem, gap=1e-6), solve(speculating(problem), gap=1e-6)
    assert speculated.objective_s <= certain.objective_s * (1 + 1e-5)
    for host_bytes in (problem.host_budget_bytes, int(1.1 * speculated.host_bytes)):
        planned = plan(replace(speculating(problem), host_budget_bytes=host_bytes))
        if planned.schedule is not None:
            validate(planned.schedule)
            assert from_dict(to_dict(planned.schedule)) == planned.schedule
