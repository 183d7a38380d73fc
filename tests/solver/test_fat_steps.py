"""Fat steps: each step runs its block for all micro-batches of an update; parameters come once, memory pays for it."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from offmate.solver import handed, items
from offmate.solver.compute_names import ComputeName, parse
from offmate.solver.fat_steps import for_all, for_one, in_passes
from offmate.solver.files import problem_from_dict
from offmate.solver.files import to_dict as problem_to_dict
from offmate.solver.instances.synthetic import Rates, Shape, Speeds, llama
from offmate.solver.items import Item, ItemKind
from offmate.solver.plan import plan
from offmate.solver.problem import Block, Option, Problem, Value
from offmate.solver.program.streamed import streaming_solution
from offmate.solver.rounding.spilled import whole_schedule
from offmate.solver.schedule import Kind, Schedule
from offmate.solver.scheduling.validate import validate
from offmate.solver.simulate import memory_highs
from offmate.solver.solve import least_budget, solve
from offmate.solver.text import from_dict, to_dict

from .random_problems import gated, random_problem

SEEDS = st.integers(0, 10_000)
SLOTS = st.sampled_from([2, 3, 4, 8])


def drawn(seed: int, tied: bool = False, gate: bool = False) -> Problem:
    rng = random.Random(seed)
    problem = random_problem(rng, tied=tied)
    return gated(problem, rng, 1) if gate else problem


def timeless(problem: Problem) -> tuple[Block, ...]:
    return tuple(
        replace(block, options=tuple(replace(o, forward_s=0.0, backward_s=0.0) for o in block.options))
        for block in problem.blocks
    )


def decoder(device_bytes: int) -> Problem:
    """A small decoder whose parameters matter more than its activations, on a slow link."""
    rates = Rates(20e9, 20e9, 36e9, 1e-5)
    shape = Shape(6, 512, 1408, 2000, batch=1, sequence=128)
    problem = llama(shape, Speeds(1e13, 3e11, 1e9, 8e10, rates), device_bytes, 2 * 10**9, whole_layers=True)
    adds = (replace(g, cpu_add_s=g.cpu_update_s / 4, device_add_s=g.device_update_s / 4) for g in problem.groups)
    return replace(problem, groups=tuple(adds))


def moved_in(schedule: Schedule) -> Counter[Item]:
    """How often parameters come to the device in an iteration."""
    found: Counter[Item] = Counter()
    for part in schedule.parts:
        for action in part.actions:
            if action.kind is Kind.PREFETCH and action.item.kind is ItemKind.PARAMETER:
                found[action.item] += part.times
    return found


# -- the problem ------------------------------------------------------------------------------------------------------


@given(SEEDS, SLOTS, st.booleans())
def test_a_problem_of_all_tells_that_of_one(seed: int, slots: int, tied: bool) -> None:
    """To the byte; seconds to a rounding error."""
    problem = drawn(seed, tied)
    again = for_one(for_all(problem, slots))
    seconds = [(o.forward_s, o.backward_s) for block in again.blocks for o in block.options]
    assert seconds == [pytest.approx((o.forward_s, o.backward_s)) for block in problem.blocks for o in block.options]
    assert again.start_s == pytest.approx(problem.start_s)
    assert replace(again, blocks=timeless(again), start_s=0.0, groups=()) == replace(
        problem, blocks=timeless(problem), start_s=0.0, groups=()
    )


def test_one_micro_batch_changes_nothing() -> None:
    problem = drawn(1)
    assert for_all(problem, 1) is problem and for_one(problem) is problem


def test_bytes_and_seconds_are_those_of_all_micro_batches() -> None:
    one = drawn(3)
    fat = for_all(one, 4)
    assert [v.bytes for v in fat.values] == [4 * v.bytes for v in one.values]
    for small, large in zip(one.blocks, fat.blocks):
        for a, b in zip(small.options, large.options):
            assert (b.saved_bytes, b.offloaded_bytes) == (4 * a.saved_bytes, 4 * a.offloaded_bytes)
            assert b.forward_s + b.backward_s == pytest.approx(4 * (a.forward_s + a.backward_s))
            # Temporaries are those of one; what is left for the backward is there for all.
            assert b.forward_peak_bytes - a.forward_peak_bytes >= 3 * (a.saved_bytes + a.offloaded_bytes)
    assert [g.param_bytes for g in fat.groups] == [g.param_bytes for g in one.groups]


def test_files_keep_the_number_of_micro_batches() -> None:
    fat = for_all(drawn(5), 3)
    assert problem_from_dict(json.loads(json.dumps(problem_to_dict(fat)))) == fat
    assert "per_step" not in problem_to_dict(drawn(5))


# -- names ------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(["F", "B"]), st.integers(0, 99), st.integers(0, 99))
def test_a_computes_name_prints_as_it_parses(what: str, block: int, slot: int) -> None:
    name = ComputeName(what, block, slot)
    assert parse(str(name)) == name


def test_the_first_micro_batch_has_the_names_of_a_single_one() -> None:
    assert str(ComputeName("F", 3)) == "F3" and str(ComputeName("user", slot=2)) == "user@2"
    assert items.value("h").at(0) == "v:h" and items.value("h").at(2) == "v:h@2"
    assert items.parameter("w").at(2) == "p:w", "parameters belong to all micro-batches"
    assert Item.parse("v:h@2@0") == items.value("h@2") and Item.parse("v:h@2").slot == 2


# -- memory within a step ---------------------------------------------------------------------------------------------


def chain(n: int, values: list[Value], option: Option) -> Problem:
    """Blocks of one option that have nothing but values."""
    blocks = tuple(Block(f"b{i}", (option,)) for i in range(n))
    rates = Rates(1e6, 1e6, 2e6)
    return Problem(blocks, (), tuple(values), (), (), rates, 10**6, 10**6, turn_around_steps=2)


def least(problem: Problem, exactly: int, spared: int = 0) -> None:
    """Check the least budget of a problem in the program, and that of its schedule, which may spare some of it."""
    for budget, fits in ((exactly, True), (exactly - 1, False)):
        assert bool(solve(replace(problem, device_budget_bytes=budget)).options) is fits
    found = plan(replace(problem, device_budget_bytes=exactly)).schedule
    assert found is not None and max(memory_highs(found)) == exactly - spared


def test_values_take_each_others_place() -> None:
    """Each of four micro-batches frees 1,000 bytes when it has made 1,000: at most five are there, and not eight."""
    values = [Value(f"h{i}", 1000, i, (i + 1,)) for i in range(3)]
    least(for_all(chain(4, values, Option("", 0, 0, 1.0, 1.0, 1000, 0)), 4), 5000)


def test_gradients_take_each_others_place() -> None:
    """As values do, in the backwards; the values that both read leave between forward and backward."""
    values = [Value(f"h{i}", 10, i, (i + 1, 10 - i), 1000, (10 - i,)) for i in range(5)]
    # A backward takes a gradient and makes one. Beside them are a value and the next one's, which comes meanwhile; the
    # program also counts a copy that would come while the last micro-batch computes.
    least(for_all(chain(6, values, Option("", 0, 0, 1.0, 1.0, 10, 2000)), 4), 5030, spared=10)


def test_what_blocks_offload_leaves_and_returns_micro_batch_by_micro_batch() -> None:
    """In the backward, the next one's bytes come while one computes: two of four are there at once."""
    problem = chain(5, [], Option("", 0, 0, 1.0, 1.0, 0, 0))
    first = replace(problem.blocks[0], options=(Option("", 0, 1000, 1.0, 1.0, 1000, 1000),))
    least(for_all(replace(problem, blocks=(first, *problem.blocks[1:])), 4), 2000)


def test_a_value_leaves_and_returns_micro_batch_by_micro_batch() -> None:
    """It is released for one micro-batch after another where it leaves, and others come in that place."""
    value = Value("h", 1000, 0, (1, 10))
    option = Option("", 0, 0, 1.0, 1.0, 1000, 1000)
    problem = chain(6, [value, Value("x", 1000, 1, (2,))], option)
    least(for_all(problem, 4), 5000)


def handing(n: int, slots: int, value_bytes: int, grad_bytes: int) -> Problem:
    """Blocks that hand on a value each, and hand back its gradient."""
    last = 2 * n - 1
    values = [Value(f"h{i}", value_bytes, i, (i + 1, last - i - 1), grad_bytes, (last - i - 1,)) for i in range(n - 1)]
    option = Option("", 0, 0, 1.0, 1.0, value_bytes, max(value_bytes, 2 * grad_bytes))
    return for_all(chain(n, values, option), slots)


@pytest.mark.parametrize("slots", [8, 12, 16])
def test_values_are_away_between_forwards(slots: int) -> None:
    """Of each value there are four copies at once, however many micro-batches there are."""
    # Two are read first, or made last; one is made or read; one leaves or comes. A forward reads a value and makes one.
    least(handing(6, slots, 1000, 0), 8000)


@pytest.mark.parametrize("slots", [8, 12, 16])
def test_gradients_of_values_are_away_between_backwards(slots: int) -> None:
    least(handing(6, slots, 0, 1000), 8000)


@pytest.mark.parametrize("slots", [5, 6, 7])
def test_of_a_few_micro_batches_fewer_are_away(slots: int) -> None:
    """The first two and the last two stay, so that copies have time."""
    away = handed.hands(handing(6, slots, 1000, 1000))
    assert {hand.bytes for hand in away} == {1000 * (slots - 4)}
    assert not handed.hands(handing(6, 4, 1000, 1000))


@given(st.integers(5, 70), st.floats(0, 1), st.floats(0, 1))
def test_whole_copies_are_spread_over_the_micro_batches(slots: int, first: float, second: float) -> None:
    """As many as the parts of two tiers say together, at least; never the first two or the last two."""
    problem, total = handing(3, slots, 1000, 0), first + second
    parts = {"host": first / max(1, total), "files": second / max(1, total)}
    numbers = handed.whole_numbers(problem, parts)
    away = handed.away_slots(problem, numbers)
    exactly = (slots - 4) * sum(parts.values())
    assert exactly - 1e-4 <= len(away) < exactly + 1
    assert all(2 <= slot <= slots - 3 for slot in away)
    assert Counter(away.values()) == numbers


def test_a_value_that_leaves_between_forwards_leaves_once() -> None:
    """The copy that the next forward has read is the one that the backward reads."""
    problem = handing(6, 12, 1000, 0)
    found = plan(replace(problem, device_budget_bytes=8000)).schedule
    assert found is not None
    moved = Counter((action.kind, action.name) for action in found.actions)
    item = items.value("h0").at(5)
    assert moved[Kind.OFFLOAD, item] == 1 and moved[Kind.PREFETCH, item] == 2 and moved[Kind.FREE, item] == 3


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from([5, 6, 8, 12]), st.integers(0, 12), st.booleans())
def test_values_hold_no_more_than_the_program_counts(seed: int, slots: int, twelfths: int, in_time: bool) -> None:
    """At budgets from the least on, where most copies are away, or none."""
    roomy = replace(drawn(seed), groups=(), device_budget_bytes=10**8, host_budget_bytes=10**8, host_in_time=in_time)
    problem = for_all(roomy, slots)
    low, high = least_budget(problem).bytes, max(solve(problem).memory_bytes)
    problem = replace(problem, device_budget_bytes=low + max(0, high - low) * twelfths // 12)
    solution = solve(problem)
    assume(all(not 0.001 < sum(flow.tiers.values()) < 0.999 for flow in solution.handed))
    schedule = whole_schedule(problem, problem, solution)
    validate(schedule)
    for action, held_bytes in zip(schedule.actions, memory_highs(schedule)):
        if action.kind is Kind.COMPUTE and action.name[0] in "FB":
            assert held_bytes <= solution.memory_bytes[action.step] + 1


# -- the schedule -----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(SEEDS, SLOTS, st.booleans(), st.booleans())
def test_every_problem_gives_a_valid_schedule(seed: int, slots: int, tied: bool, gate: bool) -> None:
    """Even the safe plan, which streams everything."""
    problem = for_all(replace(drawn(seed, tied, gate), device_budget_bytes=10**8, host_budget_bytes=10**8), slots)
    solution = streaming_solution(problem)
    schedule = whole_schedule(problem, problem, solution)
    validate(schedule)
    computes = [a.name for a in schedule.actions if a.kind is Kind.COMPUTE]
    assert Counter(parse(name).slot for name in computes if name[0] in "FB") == dict.fromkeys(
        range(slots), 2 * problem.n_blocks
    )
    for block in range(problem.n_blocks):
        for what in ("F", "B"):
            order = [parse(name).slot for name in computes if parse(name)[:2] == (what, block)]
            assert order == list(range(slots)), "sums keep plain PyTorch's order"


@settings(max_examples=40)
@given(SEEDS, SLOTS, st.booleans())
def test_no_compute_holds_more_than_the_program_counts(seed: int, slots: int, tied: bool) -> None:
    """With room for everything, where the program's fractions are whole."""
    problem = for_all(replace(drawn(seed, tied), device_budget_bytes=10**8, host_budget_bytes=10**8), slots)
    solution = solve(problem)
    schedule = whole_schedule(problem, problem, solution)
    for action, high in zip(schedule.actions, memory_highs(schedule)):
        if action.kind is Kind.COMPUTE and action.name[0] in "FB":
            assert high <= solution.memory_bytes[action.step] + 1


def test_a_schedule_survives_its_file() -> None:
    found = plan(for_all(replace(drawn(2, gate=True), device_budget_bytes=60_000), 3), ladder=())
    assert found.schedule is not None
    again = from_dict(json.loads(json.dumps(to_dict(found.schedule))))
    assert again == found.schedule and again.per_step == 3


def test_parameters_come_once_per_update_and_not_once_per_micro_batch() -> None:
    one = decoder(84_000_000)
    usual = plan(replace(one, micro_batches=8, gate=True, turn_around_steps=4), ladder=())
    blocks = plan(for_all(one, 8), ladder=())
    assert usual.schedule is not None and blocks.schedule is not None
    assert usual.simulation is not None and blocks.simulation is not None
    often, once = moved_in(usual.schedule), moved_in(blocks.schedule)
    assert max(often.values()) >= 8 and max(once.values()) <= 2
    assert blocks.simulation.step_s < 0.8 * usual.simulation.step_s


def test_gradients_need_no_gate_to_add_up() -> None:
    schedule = plan(for_all(decoder(84_000_000), 4), ladder=()).schedule
    assert schedule is not None and not schedule.gate
    updates = [a for a in schedule.backward if a.kind in (Kind.UPDATE_CPU, Kind.UPDATE_DEVICE)]
    assert updates, "updates begin while earlier blocks still run backward"


def test_a_tied_gradient_is_complete_for_each_micro_batch_before_it_is_added() -> None:
    problem = for_all(replace(drawn(4, tied=True), device_budget_bytes=10**6), 3)
    schedule = whole_schedule(problem, problem, streaming_solution(problem))
    name = next(g.tensors[0].name for g in problem.groups if len(g.grad_steps) > 1)
    last, n = problem.n_blocks - 1, items.partial(name)
    assert n.at(1) in schedule.computes[f"B{last}@1"].makes
    spec = schedule.computes["B0@1"]
    assert n.at(1) in spec.drops and items.gradient(name) in spec.needs


def test_unlimited_memory_takes_as_long_in_every_order() -> None:
    """Gradients are added up in each of them: of six micro-batches, all but the first."""
    one = replace(drawn(7, gate=True), micro_batches=1)
    one = replace(one, groups=tuple(replace(g, device_add_s=1e-3) for g in one.groups))
    seconds = [for_all(one, 6).endless_s, in_passes(one, 6, 1).endless_s, in_passes(one, 6, 4).endless_s]
    assert seconds == [pytest.approx(seconds[0])] * 3
