"""Whole-tensor plans, counted step by step from the definitions: the program must do at least as well as each."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from offmate.solver.held import held_bytes
from offmate.solver.problem import Group, Option, Problem
from offmate.solver.solution import Status
from offmate.solver.solve import least_budget, least_host, solve

from .random_problems import random_problem


@dataclass
class Count:
    """Bytes and seconds of one plan, by step."""

    memory: list[float]
    compute: list[float]
    cpu: list[float]
    link: dict[str, list[float]]
    serial_s: list[float]
    host: float = 0.0

    def move(self, problem: Problem, way: str, step: int, amount: float, *, serial: bool = False) -> None:
        self.link[way][step] += amount
        if serial:
            rate = problem.rates.in_bytes_per_s if way == "in" else problem.rates.out_bytes_per_s
            self.serial_s[step] += amount / rate


def cycle(first: int, last: int, total: int) -> list[int]:
    return [(first + k) % total for k in range((last - first) % total + 1)]


def count_idle_gap(problem: Problem, group: Group, rng: random.Random, count: Count) -> bool:
    """Count a random plan for the idle gap; True if the host then has a valid copy."""
    end = max(group.uses[-1], group.grad_steps[-1])
    idle = cycle(end, group.uses[0] - 1, problem.n_steps)
    last = len(idle) - 1
    external = problem.update == "external"
    barrier = idle.index(problem.first_turn_around)
    if external or rng.random() < 0.5:
        out = rng.randint(0, barrier if external else last - 2)
        update = barrier if external else rng.randint(out + 1, last - 1)
        back = rng.randint(update + 1, last)
        count.move(problem, "out", idle[out], group.grad_bytes, serial=out == 0)
        count.move(problem, "in", idle[back], group.param_bytes)
        count.cpu[idle[update]] += group.cpu_update_s
        for k in range(1, last + 1):
            count.memory[idle[k]] += group.grad_bytes * (k <= out) + group.param_bytes * (k >= back)
        count.host += group.param_bytes + group.grad_bytes + group.state_bytes
        return True
    count.compute[end] += group.device_update_s
    _count_states(problem, group, end, rng, count)
    if rng.random() < 0.4:
        for step in idle[1:]:
            count.memory[step] += group.param_bytes
        return False
    out = rng.randint(0, last)
    count.move(problem, "out", idle[out], group.param_bytes, serial=out == 0)
    count.host += group.param_bytes
    back = rng.randint(out + 1, last) if out < last and rng.random() < 0.7 else None
    for k in range(1, last + 1):
        count.memory[idle[k]] += group.param_bytes * (back is None or k <= out or k >= back)
    if back is not None:
        count.move(problem, "in", idle[back], group.param_bytes)
    return True


def _count_states(problem: Problem, group: Group, end: int, rng: random.Random, count: Count) -> None:
    steps = cycle(end, end - 1, problem.n_steps)
    out = rng.randint(0, len(steps) - 2)
    back = rng.randint(out + 1, len(steps) - 1)
    leaves = group.state_bytes and rng.random() < 0.7
    for k, step in enumerate(steps):
        count.memory[step] += group.state_bytes * (not leaves or k <= out or k >= back)
    if leaves:
        count.move(problem, "out", steps[out], group.state_bytes, serial=out == 0)
        count.move(problem, "in", steps[back], group.state_bytes)
        count.host += group.state_bytes


def count_group(problem: Problem, group: Group, rng: random.Random, count: Count) -> None:
    points = sorted({*group.uses, *group.grad_steps[-1:]})
    for step in points:
        count.memory[step] += group.param_bytes
    gaps = list(pairwise(points))
    on_host = count_idle_gap(problem, group, rng, count) if group.trainable else rng.random() < 0.7
    if not group.trainable:
        gaps.append((points[-1], points[0]))
        count.host += group.param_bytes * on_host
    for after, before in gaps:
        between = cycle(after, before - 1, problem.n_steps)[1:]
        back = rng.choice(between) if between and on_host and rng.random() < 0.6 else None
        for k, step in enumerate(between):
            count.memory[step] += group.param_bytes * (back is None or k >= between.index(back))
        if back is not None:
            count.move(problem, "in", back, group.param_bytes)


def count_block(problem: Problem, i: int, option: Option, early: bool, count: Count) -> None:
    backward = problem.backward_step(i)
    count.compute[i] += option.forward_s
    count.compute[backward] += option.backward_s
    count.memory[i] += option.forward_peak_bytes
    count.memory[backward] += option.backward_peak_bytes
    for step in range(i + 1, backward):
        count.memory[step] += option.saved_bytes + option.offloaded_bytes * (early and step in (i + 1, backward - 1))
    out, back = (i + 1, backward - 1) if early else (i, backward)
    count.move(problem, "out", out, option.offloaded_bytes, serial=not early)
    count.move(problem, "in", back, option.offloaded_bytes, serial=not early)
    count.host += option.offloaded_bytes


def count_values(problem: Problem, rng: random.Random, count: Count) -> None:
    for value in problem.values:
        forwards = [value.made, *(u for u in value.uses if u < problem.n_blocks)]
        backwards = [u for u in value.uses if u >= problem.n_blocks]
        away: range = range(0)
        if backwards and backwards[0] - forwards[-1] >= 3 and rng.random() < 0.5:
            away = range(forwards[-1] + 1, backwards[0] - 1)
            count.move(problem, "out", forwards[-1], value.bytes, serial=forwards[-1] == value.made)
            count.move(problem, "in", backwards[0] - 1, value.bytes)
            count.host += value.bytes
        for step in range(value.made + 1, value.uses[-1] + 1):
            count.memory[step] += value.bytes * (step not in away)


def random_plan(problem: Problem, rng: random.Random) -> tuple[float, float, float]:
    """A random whole-tensor plan: its seconds, its device bytes, its host bytes."""
    total, n = problem.n_steps, problem.n_blocks
    zeros = [0.0] * total
    links: dict[str, list[float]] = defaultdict(lambda: list(zeros))
    count = Count(list(zeros), list(zeros), list(zeros), links, list(zeros))
    for group in problem.groups:
        count_group(problem, group, rng, count)
    count_values(problem, rng, count)
    held = held_bytes(problem)
    outside_0, outside_n = count.memory[0], count.memory[n]
    saved_last = 0
    for i, block in enumerate(problem.blocks):
        option = rng.choice([o for o in block.options if not o.offloaded_bytes or i <= n - 2])
        early = option.offloaded_bytes > 0 and rng.random() < 0.5
        before = count.memory[n]
        count_block(problem, i, option, early, count)
        saved_last = option.saved_bytes
        outside_n += count.memory[n] - before if i < n - 1 else saved_last
    handed_in = sum(o.grad_bytes for o in problem.outputs if problem.backward_step(o.made) > n)
    start = outside_0 + held[0] - sum(s.bytes for s in problem.shared) + problem.start_peak_bytes
    user = outside_n + held[n] - handed_in + problem.user_bytes
    device = max(start, user, *(m + h for m, h in zip(count.memory, held)))
    count.compute[0] += problem.start_s
    return sum(_step_s(problem, count, t) for t in range(total)), device, count.host


def _step_s(problem: Problem, count: Count, t: int) -> float:
    rates, (came, went) = problem.rates, (count.link["in"][t], count.link["out"][t])
    parts = [
        count.compute[t] + count.serial_s[t],
        came / rates.in_bytes_per_s,
        went / rates.out_bytes_per_s,
        (came + went) / rates.both_bytes_per_s,
        rates.manage_s + count.cpu[t],
    ]
    if rates.shared_cores:
        parts.append(count.compute[t] + count.cpu[t] + (came + went) / rates.both_bytes_per_s)
    return max(parts)


@pytest.mark.parametrize("seed", range(30))
def test_no_whole_plan_is_better(seed: int) -> None:
    rng = random.Random(seed)
    update = "external" if seed % 3 == 0 else "planned"
    problem = random_problem(rng, n_blocks=2, tensors=1, update=update, tied=seed % 2 == 0)  # type: ignore[arg-type]
    if seed % 5 == 0:
        problem = replace(problem, rates=replace(problem.rates, shared_cores=True))
    plans = [random_plan(problem, rng) for _ in range(400)]
    frontier = [min(plans), min(plans, key=lambda p: p[1]), min(plans, key=lambda p: p[2]), *rng.sample(plans, 3)]
    for seconds, device, host in frontier:
        within = replace(problem, device_budget_bytes=int(device), host_budget_bytes=int(host))
        solution = solve(within, gap=1e-6)
        assert solution.status is Status.OPTIMAL
        assert solution.lower_bound_s <= seconds * (1 + 1e-6)
        assert solution.objective_s <= seconds + 2e-4 * seconds
        assert max(solution.memory_bytes) <= device
        assert solution.host_bytes <= host
    endless = replace(problem, host_budget_bytes=10**9)
    assert least_budget(endless).bytes <= min(p[1] for p in plans) * (1 + 2e-6) + 256
    assert least_host(problem) <= min(p[2] for p in plans) * (1 + 2e-6) + 256
