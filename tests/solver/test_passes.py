"""Passes of several micro-batches: each adds to the totals of those before, gradient by gradient, on the device."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offmate.solver import items
from offmate.solver.compute_names import parse
from offmate.solver.effects import with_actions
from offmate.solver.fat_steps import for_all, for_one, in_passes
from offmate.solver.files import problem_from_dict
from offmate.solver.files import to_dict as problem_to_dict
from offmate.solver.items import ItemKind
from offmate.solver.passes import between
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, ProblemError
from offmate.solver.program.streamed import streaming_solution
from offmate.solver.resources import Resource
from offmate.solver.rounding.spilled import whole_schedule
from offmate.solver.schedule import Action, Kind, Schedule
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import memory_highs, simulate
from offmate.solver.solve import solve
from offmate.solver.text import from_dict, to_dict

from .random_problems import gated, random_problem
from .test_fat_steps import decoder, moved_in

SEEDS = st.integers(0, 10_000)
COUNTS = st.sampled_from([(3, 2), (4, 2), (5, 2), (7, 2), (5, 3), (7, 3), (8, 3)])
ROOM = 10**8


def drawn(seed: int, count: int, per_step: int, *, tied: bool = False) -> Problem:
    """A random problem with room for everything."""
    rng = random.Random(seed)
    one = gated(random_problem(rng, tied=tied), rng, 1)
    return in_passes(replace(one, device_budget_bytes=ROOM, host_budget_bytes=ROOM), count, per_step)


def streamed(problem: Problem) -> Schedule:
    return whole_schedule(problem, problem, streaming_solution(problem))


def additions(schedule: Schedule) -> dict[str, list[int]]:
    """By tensor, the micro-batches whose gradients are added, in order; a middle pass counts once."""
    found: dict[str, list[int]] = {}
    for number, one in enumerate(schedule.passes):
        slot = 0
        for action in one.backward:
            if action.kind is Kind.COMPUTE:
                slot = parse(action.name).slot
            if action.kind in (Kind.BEGIN_TOTAL, Kind.ACCUMULATE):
                found.setdefault(action.name, []).append(number * schedule.per_step + slot)
    return found


# -- the problem ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "per_step", "passes", "last"), [(5, 2, 3, 1), (6, 2, 3, 0), (5, 3, 2, 2)])
def test_the_last_pass_runs_what_is_left(count: int, per_step: int, passes: int, last: int) -> None:
    problem = drawn(1, count, per_step)
    assert (problem.micro_batches, problem.last_per_step, problem.per_update) == (passes, last, count)
    assert problem_from_dict(json.loads(json.dumps(problem_to_dict(problem)))) == problem
    assert for_one(problem).per_step == 1 and for_one(problem).micro_batches == passes


def test_one_and_all_per_pass_are_the_orders_without_passes() -> None:
    rng = random.Random(2)
    one = gated(random_problem(rng), rng, 1)
    assert in_passes(one, 5, 1) == replace(one, micro_batches=5)
    assert in_passes(one, 5, 5) == in_passes(one, 5, 9) == for_all(one, 5)
    assert "last_per_step" not in problem_to_dict(in_passes(one, 6, 3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"last_per_step": 2}, "last_per_step is 2; it must be less than per_step, 2"),
        ({"last_per_step": 1, "micro_batches": 1}, "last_per_step is 1, but there is one pass"),
        ({"gate": False, "gate_s": 0.0}, "more than one needs planned updates and a gate"),
        ({"per_step": 0}, "per_step is 0"),
    ],
)
def test_problems_that_cannot_be(change: dict[str, object], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        replace(drawn(1, 5, 2), **change)  # type: ignore[arg-type]


# -- the schedule -----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(SEEDS, COUNTS, st.booleans())
def test_every_problem_gives_a_valid_schedule_that_adds_in_order(
    seed: int, counts: tuple[int, int], tied: bool
) -> None:
    """Even the safe plan, which streams everything."""
    problem = drawn(seed, *counts, tied=tied)
    schedule = streamed(problem)
    validate(schedule)
    left = [schedule.per_step] * len(schedule.lead) + [schedule.last_slots]
    expected = [number * schedule.per_step + slot for number, slots in enumerate(left) for slot in range(slots)]
    assert set(map(tuple, additions(schedule).values())) == {tuple(expected)}
    assert simulate(schedule).step_s > 0
    assert from_dict(json.loads(json.dumps(to_dict(schedule)))) == schedule


@settings(max_examples=25)
@given(SEEDS, COUNTS, st.booleans())
def test_no_compute_holds_more_than_the_program_counts(seed: int, counts: tuple[int, int], tied: bool) -> None:
    problem = drawn(seed, *counts, tied=tied)
    solution = solve(problem)
    schedule = whole_schedule(problem, problem, solution)
    for action, high in zip(schedule.actions, memory_highs(schedule)):
        if action.kind is Kind.COMPUTE and action.name[0] in "FB":
            assert high <= solution.memory_bytes[action.step] + 1


@settings(max_examples=25)
@given(SEEDS, COUNTS, st.booleans(), st.sampled_from([0.2, 0.5]))
def test_a_tight_budget_is_kept_by_whole_tensors(seed: int, counts: tuple[int, int], tied: bool, part: float) -> None:
    problem = drawn(seed, *counts, tied=tied)
    ample = plan(problem, ladder=()).schedule
    assert ample is not None
    least, most = max(memory_highs(streamed(problem))), max(memory_highs(ample))
    tight = replace(problem, device_budget_bytes=int(least + part * max(0, most - least)))
    schedule = plan(tight, ladder=()).schedule
    assert schedule is not None and max(memory_highs(schedule)) <= tight.device_budget_bytes
    validate(schedule)


def test_parameters_come_once_per_pass() -> None:
    one = replace(decoder(84_000_000), gate=True, turn_around_steps=4)
    often = {k: sum(moved_in(streamed(in_passes(one, 8, k))).values()) for k in (1, 2, 4, 8)}
    assert all(often[k] == pytest.approx(often[1] / k, rel=0.01) for k in often)
    seconds = {}
    for k in (1, 4):
        simulation = plan(in_passes(one, 8, k), ladder=()).simulation
        assert simulation is not None
        seconds[k] = simulation.step_s
    assert seconds[4] < 0.9 * seconds[1]


def test_totals_leave_between_passes_where_there_is_no_room_for_them() -> None:
    """Whoever updates: forced to the device, gradients of all blocks do not fit beside each other either."""
    for side in ("host", "device"):
        problem = drawn(3, 5, 2)
        groups = tuple(replace(g, side=side) for g in problem.groups)
        problem = replace(problem, groups=groups)
        schedule = streamed(problem)
        returns = Counter(
            a.item.name for one in schedule.passes for a in (*one.forward, *one.backward)
            if a.kind is Kind.PREFETCH and a.item.kind is ItemKind.TOTAL
        )  # fmt: skip
        assert set(returns.values()) == {2}, "once before the middle pass, once before the last"
        assert not any(a.kind is Kind.ACCUMULATE_CPU for a in schedule.actions)


# -- what is refused --------------------------------------------------------------------------------------------------


def changed(schedule: Schedule, change: Callable[[list[Action]], list[Action]], part: int) -> Schedule:
    parts = [list(one.actions) for one in schedule.parts]
    parts[part] = change(parts[part])
    return with_actions(schedule, parts)


def lacks(kind: Kind, name: str, often: int = 1) -> Callable[[list[Action]], list[Action]]:
    def without(actions: list[Action]) -> list[Action]:
        found = [a for a in actions if a.kind is kind and a.name == name]
        assert len(found) >= often
        return [a for a in actions if a not in found[:often]]

    return without


def test_schedules_broken_in_one_way_are_refused() -> None:
    problem = drawn(3, 6, 2)
    problem = replace(problem, groups=tuple(replace(g, side="host") for g in problem.groups))
    schedule = streamed(problem)
    validate(schedule)
    name = next(g.tensors[0].name for g in problem.groups if g.trainable and g.grad_steps[0] == problem.n_blocks)
    total, backward = items.total(name), 1
    cases = [
        (lacks(Kind.OFFLOAD, total), backward, "neither used by an update nor on the host"),
        (lacks(Kind.ACCUMULATE, name), backward, "before it was added|no action does it"),
        (lacks(Kind.BEGIN_TOTAL, name), backward, "has not begun yet|no action does it"),
        (lacks(Kind.OFFLOAD, total), len(schedule.parts) - 2, "neither used by an update nor on the host"),
    ]
    for change, part, words in cases:
        with pytest.raises(ScheduleError, match=words):
            validate(changed(schedule, change, part))

    def returns_whole(actions: list[Action]) -> list[Action]:
        """After the last addition, what the gate scales is on the host."""
        return [*actions, Action(actions[-1].step, Kind.PREFETCH, total), Action(actions[-1].step, Kind.FREE, total)]

    with pytest.raises(ScheduleError, match="returns before the gate"):
        validate(changed(schedule, returns_whole, len(schedule.parts) - 2))
    with pytest.raises(ScheduleError, match="last_per_step"):
        validate(replace(schedule, last_per_step=2))


# -- the number that is tried -----------------------------------------------------------------------------------------


def slow_link(part: float) -> Problem:
    """Sixteen micro-batches whose parameters take, for each of them, this many times as long as their computes.

    Gradients leave and are added up in no time.
    """
    one = replace(decoder(84_000_000), gate=True, turn_around_steps=4)
    one = replace(one, groups=tuple(replace(group, cpu_add_s=0.0) for group in one.groups))
    moved = sum(len({step < one.n_blocks for step in g.uses}) * g.param_bytes for g in one.groups)
    rate = moved / (part * one.computes_s)
    return replace(one, micro_batches=16, rates=replace(one.rates, in_bytes_per_s=rate, out_bytes_per_s=100 * rate))


@pytest.mark.parametrize(("part", "number"), [(0.9, None), (1.5, 4), (2.5, 4), (5.0, 8), (20.0, None)])
def test_the_least_number_that_hides_the_copies_is_tried(part: float, number: int | None) -> None:
    """Of totals, too, from two per pass on. One or all of the update have been tried already."""
    assert between(slow_link(part), 100.0, all_fit=True) == number


def test_gradients_that_leave_and_are_added_count_as_well() -> None:
    """Half as many bytes as parameters leave. With several per pass the GPU adds, and the host does not."""
    usual = slow_link(0.9)
    slow_out = replace(usual.rates, out_bytes_per_s=usual.rates.bytes_per_s(Resource.IN) / 8)
    assert between(replace(usual, rates=slow_out), 100.0, all_fit=True) == 4
    each_s = usual.all_computes_s / usual.per_update / sum(g.trainable for g in usual.groups)
    for part, number in ((0.5, None), (1.5, 2)):
        groups = tuple(replace(g, cpu_add_s=part * each_s) if g.trainable else g for g in usual.groups)
        assert between(replace(usual, groups=groups), 100.0, all_fit=True) == number


def test_a_number_that_fits_is_tried_where_all_do_not() -> None:
    problem = slow_link(20.0)
    assert between(problem, 100.0, all_fit=False) == 8
    one, least = replace(problem, micro_batches=1), dict[int, int]()
    for number in (2, 4, 8):
        least[number] = max(memory_highs(streamed(in_passes(one, 16, number))))
    assert least[2] < least[4] < least[8]
    for budget, number in ((least[4], 4), (least[2], 2), (least[2] - 1, None)):
        tight = replace(problem, device_budget_bytes=budget)
        assert between(tight, 100.0, all_fit=False) == number


def test_nothing_is_tried_where_computes_take_all_the_time() -> None:
    problem = slow_link(5.0)
    alone_s = problem.all_computes_s + problem.gate_s
    assert between(problem, 1.005 * alone_s, all_fit=True) is None
    assert between(problem, 1.05 * alone_s, all_fit=True) == 8
    assert between(replace(problem, micro_batches=2), 100.0, all_fit=True) is None
