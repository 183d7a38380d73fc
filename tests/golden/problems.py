"""Random problems: for each the hashes of its linear models and of its schedule, as they were and as they are.

Seeds whose search ends at another of several best points on another processor are not among them. Of problems whose
steps run for several micro-batches there are the linear models alone.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from offmate.solver import files
from offmate.solver.fat_steps import for_all, in_passes
from offmate.solver.linear import LinearModel
from offmate.solver.plan import plan
from offmate.solver.problem import Problem
from offmate.solver.program.model import state_program
from offmate.solver.schedule import Schedule
from offmate.solver.solve import least_budget
from offmate.solver.text import to_dict, to_text

from ..solver.random_problems import gated, in_rows, random_problem

PROBLEMS = 240
_FAT = 10_000  # seeds from here on are of steps for several micro-batches
_ROOM = (0.0, 0.2, 0.5, 1.5)  # of the device's least budget, on top of it


def problem_of(seed: int) -> Problem:
    """A random problem: with or without a gate, tied weights, pieces of states and updates of its own."""
    rng = random.Random(seed)
    external = seed % 5 == 4
    problem = random_problem(
        rng,
        n_blocks=rng.choice((2, 2, 3, 3, 4)),
        tensors=rng.choice((1, 1, 2, 2, 3)),
        update="external" if external else "planned",
        tied=rng.random() < 0.4,
    )
    if not external and rng.random() < 0.3:
        problem = in_rows(problem)
    if not external and rng.random() < 0.5:
        problem = gated(problem, rng, rng.choice([1, 1, 2, 3, 4]))
    if seed >= _FAT:
        problem = _fat(problem, rng)
    least = least_budget(problem).bytes
    return replace(problem, device_budget_bytes=int(least * (1 + rng.choice(_ROOM))))


def _fat(problem: Problem, rng: random.Random) -> Problem:
    """The problem whose steps run for 2 to 12 micro-batches: all of an update's, or, behind a gate, some of them."""
    slots = rng.choice([2, 3, 5, 8, 12])
    if not problem.gate or problem.micro_batches == 1:
        return for_all(replace(problem, micro_batches=1), slots)
    return in_passes(replace(problem, micro_batches=1), slots * problem.micro_batches - 1, slots)


def hashes_of(seed: int) -> dict[str, str]:
    """Hashes of a problem, its three linear models, and the schedule that planning finds for it."""
    problem = problem_of(seed)
    goals = ("time", "device", "host")
    found = {
        "problem": _hash(json.dumps(_plain(problem), sort_keys=True)),
        **{goal: _hash(_lines(state_program(problem, goal).model)) for goal in goals},  # type: ignore[arg-type]
    }
    if seed >= _FAT:
        return found
    planned = plan(problem)
    return found | {"schedule": schedule_hash(planned.schedule) if planned.schedule else planned.solution.status.name}


def _plain(problem: Problem) -> dict[str, Any]:
    """A problem's fields; nothing is said of fields without rows, nor of further tiers and workers without any."""
    found = files.to_dict(problem)
    return {name: value for name, value in found.items() if value != [] and name not in ("format", "version")}


def schedule_hash(schedule: Schedule) -> str:
    """A hash of all that is printed and saved of a schedule."""
    return _hash(to_text(schedule), json.dumps(_rounded(to_dict(schedule)), sort_keys=True))


def _rounded(data: Any) -> Any:
    """The same with every float short of the digits in which additions in another order differ."""
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_rounded(value) for value in data]
    return f"{data:.12g}" if isinstance(data, float) else data


def _lines(model: LinearModel) -> Iterable[str]:
    for column in zip(model.names, model.upper, model.integer, model.costs):
        yield repr(column)
    for row in model.rows:
        yield repr((row.name, row.columns, row.coefficients, row.bound, row.equal))


def _hash(*texts: Iterable[str] | str) -> str:
    found = hashlib.sha256()
    for text in texts:
        for line in [text] if isinstance(text, str) else text:
            found.update(line.encode() + b"\n")
    return found.hexdigest()[:16]
