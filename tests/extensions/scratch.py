"""What test_new_item.py runs on a patched copy of the packages: `python -m tests.extensions.scratch FOLDER`.

The patch adds scratch memory, the item `w:I`: bytes that the device gives block I while its forward or its backward
runs. A problem states it as rows (block, bytes).
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
from offmate.solver import items
from offmate.solver import plan as planning
from offmate.solver.files import problem_from_dict
from offmate.solver.files import to_dict as problem_to_dict
from offmate.solver.items import Item, ItemKind
from offmate.solver.problem import Option, Problem, ProblemError
from offmate.solver.program.model import state_program
from offmate.solver.rounding.groups import round_solution
from offmate.solver.schedule import Action, Kind, Schedule
from offmate.solver.scheduling.emit import build_schedule
from offmate.solver.scheduling.forward_only import stream_schedule
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.simulate import memory_highs, simulate
from offmate.solver.solve import least_budget, solve
from offmate.solver.text import from_dict, to_dict

import offmate
from offmate.lowering import problem as lowering

from ..fuzz.figures import from_hardware_file
from ..fuzz.solved import QUICK
from ..offmate.loops import Loop, adamw, assert_same, batch, plain, tiny
from ..solver.random_problems import gated, in_rows, random_problem

plan = functools.partial(planning.plan, ladder=QUICK)
SEEDS = range(6)
LARGE = 1 << 20  # more than any of the random problems has in all
ROWS = ((0, 1 << 10), (3, 100), (6, 4 << 10), (7, 1 << 9))  # of the tiny model's eight blocks
STEPS = 4


def without_scratch(seed: int) -> Problem:
    """A random problem on a small device, at times with a gate, several micro-batches or updates by the user's code."""
    rng = random.Random(seed)
    external = seed % 4 == 3
    problem = random_problem(rng, n_blocks=rng.choice((2, 3, 4)), update="external" if external else "planned")
    if not external:
        problem = gated(in_rows(problem), rng, 1 + seed % 3)
    return replace(problem, device_budget_bytes=int(least_budget(problem).bytes * rng.choice((1.0, 1.3))))


def with_scratch(problem: Problem, seed: int) -> Problem:
    """The problem with scratch memory for some of its blocks, and that much larger a device."""
    rng = random.Random(seed)
    rows = tuple((i, 64 * rng.randint(1, 40)) for i in range(problem.n_blocks) if rng.random() < 0.7 or i == 1)
    most = max(size for _, size in rows)
    return replace(problem, scratch=rows, device_budget_bytes=problem.device_budget_bytes + most)


def as_part_of_peaks(problem: Problem) -> Problem:
    """The problem whose options' own peaks contain the scratch memory."""

    def higher(option: Option, more: int) -> Option:
        forward, backward = option.forward_peak_bytes + more, option.backward_peak_bytes + more
        return replace(option, forward_peak_bytes=forward, backward_peak_bytes=backward)

    more = dict(problem.scratch)
    blocks = (
        replace(block, options=tuple(higher(option, more.get(i, 0)) for option in block.options))
        for i, block in enumerate(problem.blocks)
    )
    return replace(problem, blocks=tuple(blocks), scratch=())


def is_release(action: Action) -> bool:
    return action.kind is Kind.FREE and action.item.kind is ItemKind.SCRATCH


def scratch_of(schedule: Schedule) -> list[int]:
    """By action the bytes of scratch memory while it is carried out; a block's goes in the step of its compute."""
    found = []
    held: Item | None = None
    for action in schedule.actions:
        if is_release(action):
            assert action.item == held
        if action.kind is Kind.COMPUTE:
            assert held is None, f"{action} while {held} is there"
            item = items.scratch(int(action.name[1:])) if action.name[0] in "FB" else None
            held, step = (item if item in schedule.item_bytes else None), action.step
        assert held is None or action.step == step, f"{held} stays beyond step {step}"
        found.append(0 if held is None else schedule.item_bytes[held])
        held = None if is_release(action) else held
    assert held is None
    return found


def removed(schedule: Schedule) -> Schedule:
    """The schedule without scratch memory."""
    sizes = schedule.item_bytes

    def kept(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(action for action in actions if not is_release(action))

    computes = {}
    for name, spec in schedule.computes.items():
        makes = tuple(item for item in spec.makes if item.kind is not ItemKind.SCRATCH)
        more = sum(sizes[item] for item in set(spec.makes) - set(makes))
        computes[name] = replace(spec, makes=makes, rise_bytes=spec.rise_bytes - more)
    return replace(
        schedule,
        item_bytes={item: size for item, size in sizes.items() if item.kind is not ItemKind.SCRATCH},
        computes=computes,
        forward=kept(schedule.forward),
        backward=kept(schedule.backward),
        turn_around=kept(schedule.turn_around),
        lead=tuple(replace(one, forward=kept(one.forward), backward=kept(one.backward)) for one in schedule.lead),
    )


def check_levels(alone: Schedule, both: Schedule) -> None:
    """The level of every action is the one without scratch memory, and the scratch memory that is there."""
    rows = list(zip(both.actions, memory_highs(both), scratch_of(both)))
    assert [action for action, *_ in rows if not is_release(action)] == list(alone.actions)
    levels = [high - more for action, high, more in rows if not is_release(action)]
    assert levels == memory_highs(alone)
    assert simulate(both).peak_bytes == max(high for _, high, _ in rows)


def check_program(problem: Problem) -> None:
    """The integer program counts scratch memory in every step of its block, as a part of what the block holds."""
    for goal in ("time", "device", "host"):
        assert state_program(problem, goal).model == state_program(as_part_of_peaks(problem), goal).model


def check_planned(alone: Problem, both: Problem) -> Schedule:
    """The same decisions give the same actions and the releases; what planning finds is valid in the same way.

    Returns: the schedule found.
    """
    decisions = round_solution(both, solve(both))
    built = build_schedule(both, decisions)
    check_levels(build_schedule(alone, decisions), built)
    for before, action in pairwise(built.actions):
        assert before.kind is Kind.COMPUTE or not is_release(action), f"{before} is between a compute and its release"
    schedule = plan(both).schedule
    assert schedule is not None
    validate(schedule)
    assert from_dict(to_dict(schedule)) == schedule
    check_levels(removed(schedule), schedule)
    validate(removed(schedule))
    blocks = sorted(action.item.block for action in schedule.actions if is_release(action))
    assert blocks == sorted(2 * both.n_passes * [block for block, _ in both.scratch])
    return schedule


def check_refused(alone: Problem, schedule: Schedule) -> None:
    """One byte less than the peak is too little for a schedule; where scratch memory has no room there is no plan."""
    peak = max(memory_highs(schedule))
    validate(replace(schedule, device_budget_bytes=peak))
    raises(ScheduleError, lambda: validate(replace(schedule, device_budget_bytes=peak - 1)))
    large = replace(alone, scratch=((alone.n_blocks - 1, LARGE),), device_budget_bytes=LARGE)
    assert plan(large).schedule is None
    assert least_budget(large).bytes > LARGE


def check_forward_only(alone: Problem, both: Problem) -> None:
    """A forward without backward gives its blocks their scratch memory, too."""
    first, second = (
        stream_schedule(replace(problem, values=tuple(forward_values(problem)), device_budget_bytes=LARGE))[0]
        for problem in (alone, both)
    )
    assert first is not None and second is not None
    check_levels(first, second)


def forward_values(problem: Problem) -> list:
    """Values that forwards alone read."""
    uses = {value.name: tuple(u for u in value.uses if u < problem.n_blocks) for value in problem.values}
    return [replace(v, uses=uses[v.name], grad_bytes=0, grad_steps=()) for v in problem.values if uses[v.name]]


def check_rows(problem: Problem) -> None:
    """Rows are kept in files, and those that contradict the problem are refused."""
    assert problem_from_dict(problem_to_dict(problem)) == problem
    for rows in (((problem.n_blocks, 64),), ((0, 64), (0, 64)), ((0, -1),), ((0, 0.5),)):
        raises(ProblemError, lambda rows=rows: replace(problem, scratch=rows))


def raises(kind: type[Exception], work: Callable[[], object]) -> None:
    try:
        work()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def compiled() -> Loop:
    """The tiny model on the smallest device on which it can train with scratch memory."""
    model = tiny()
    optimizer = adamw(model)
    settings = {
        "optimizer": optimizer,
        "device": "emulated",
        "cpu_budget": 1 << 30,
        "config": offmate.Config(cache_dir=None),
    }
    with from_hardware_file(), mock.patch.object(lowering, "Problem", functools.partial(Problem, scratch=ROWS)):
        least = offmate.plan(model, 1 << 30, example_inputs=batch(0), **settings).least_budget_bytes
        known = offmate.plan(model, least, example_inputs=batch(0), **settings)
        offmate.compile(model, least, plan=known, **settings)
    return Loop(model, optimizer)


def measured_highs(loop: Loop, step: int) -> tuple[float, list[int]]:
    """A step's loss, and by action the most bytes on the device until the next action began."""
    ledger, highs = loop.executor.device.ledger, []

    def begins(action: Action) -> None:
        highs.append(ledger.peak_bytes)
        ledger.reset_peak()

    loop.executor.on_action = begins
    loss = loop.step(step)
    loop.executor.on_action = None
    return loss, [*highs[1:], ledger.peak_bytes]


def check_replayed() -> None:
    """Numbers are plain PyTorch's, and the ledger's peak during every action is the prediction, to the byte."""
    loop, reference = compiled(), plain()
    known = loop.model.offmate.plan
    schedule = known.schedule
    assert {item: size for item, size in schedule.item_bytes.items() if item.kind is ItemKind.SCRATCH} == {
        items.scratch(block): size for block, size in ROWS
    }
    assert loop.steps(0, 2) == reference.steps(0, 2)
    assert loop.model.offmate.peak_bytes == known.predicted_peak_bytes
    predicted = [high + known.fixed_bytes for high in memory_highs(schedule)]
    for step in range(2, STEPS):
        loss, highs = measured_highs(loop, step)
        assert loss == reference.step(step)
        assert highs == predicted
        assert max(highs) == known.predicted_peak_bytes
    assert_same(loop, reference)
    with torch.no_grad():
        assert torch.equal(loop.forward(STEPS), reference.forward(STEPS))
    loop.session.device.close()


def main(folder: str) -> None:
    for package in ("offmate", "offmate.solver", "offmate.runtime"):
        (found,) = sys.modules[package].__path__
        assert Path(folder).resolve() in Path(found).resolve().parents, f"{package} is {found}, not the copy's"
    for seed in SEEDS:
        alone = without_scratch(seed)
        both = with_scratch(alone, seed)
        check_rows(both)
        check_program(both)
        check_refused(alone, check_planned(alone, both))
        check_forward_only(alone, both)
    check_replayed()


if __name__ == "__main__":
    main(sys.argv[1])
