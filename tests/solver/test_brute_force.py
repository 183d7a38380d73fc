"""Whole-tensor plans, counted step by step from the definitions: the program must do at least as well as each."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise, product

import pytest
from offmate.solver.fat_steps import in_passes
from offmate.solver.instances.synthetic import speculating
from offmate.solver.problem import Group, Option, Problem
from offmate.solver.program.held import held_bytes
from offmate.solver.resources import Path, Tier
from offmate.solver.solution import Status
from offmate.solver.solve import least_budget, least_host, least_host_within_device, solve

from .random_problems import gated, in_rows, limited, random_problem

pytestmark = pytest.mark.sampled(3)


@dataclass
class Count:
    """Bytes and seconds of one plan, by step."""

    memory: list[float]
    compute: list[float]
    cpu: list[float]
    link_s: dict[str, list[float]]
    serial_s: list[float]
    passing: list[float]  # bytes on the host by step, of what is there for a part of the iteration only
    host: float = 0.0  # all bytes on the host, if each has memory of its own
    always: float = 0.0  # those of them that are there for the whole iteration
    ring: bool = False  # whether states come from a drive for updates on the host

    def keep(self, amount: float) -> None:
        """Count bytes on the host for the whole iteration."""
        self.host += amount
        self.always += amount

    def stay(self, stays: Iterable[Iterable[int]], amount: float) -> None:
        """Count bytes on the host, in the steps of some stays."""
        self.host += amount
        for steps in stays:
            for step in steps:
                self.passing[step] += amount

    def pass_through(self, problem: Problem, step: int, *amounts: float) -> None:
        """Count states that come from a drive for an update on the host, and go back there; the first needs room."""
        path = problem.rates.tiers[0].path
        for link, name in zip(path.links, DRIVE.values()):
            self.link_s[name][step] += sum(amounts) / path.bytes_per_s(link)
        self.keep(problem.ring_bytes if not self.ring else 0)
        self.ring = True

    def move(
        self, problem: Problem, way: str, step: int, *amounts: float, serial: bool = False, drive: bool = False
    ) -> None:
        """Count copies of so many bytes each; those of a drive's take its own link as well."""
        if drive:
            path = problem.rates.tiers[0].path
            self.link_s[DRIVE[way]][step] += sum(amounts) / path.bytes_per_s(path.into if way == "in" else path.out)
        rate = problem.rates.in_bytes_per_s if way == "in" else problem.rates.out_bytes_per_s
        seconds = sum(amount / rate + problem.rates.per_copy_s for amount in amounts if amount)
        self.link_s[way][step] += seconds
        if serial:
            self.serial_s[step] += seconds

    def move_slots(self, problem: Problem, way: str, step: int, amount: float, *, serial: bool = False) -> None:
        """Count the copies of what each micro-batch of a step has; one of them cannot overlap the step's computes."""
        one = amount / problem.per_step
        self.move(problem, way, step, *[one] * (problem.slots_at(step) - 1))
        self.move(problem, way, step, one, serial=serial)


def params(group: Group) -> list[int]:
    return [tensor.param_bytes for tensor in group.tensors]


def grads(group: Group) -> list[int]:
    return [tensor.grad_bytes for tensor in group.tensors]


def states(group: Group) -> list[int]:
    return [tensor.piece_bytes(rows) for tensor in group.tensors for rows in tensor.pieces]


def cycle(first: int, last: int, total: int) -> list[int]:
    return [(first + k) % total for k in range((last - first) % total + 1)]


BY_HOST, IN_FILES, BY_HOST_IN_FILES = "updated by the host", "in files", "updated by the host in files"
DRIVE = {"in": "read", "out": "written"}


def count_idle_gap(problem: Problem, group: Group, rng: random.Random, count: Count) -> bool | str:
    """Count a random plan for the idle gap; return whether the host (True, BY_HOST) or a drive then has a copy."""
    first_end = max(group.uses[-1], group.grad_steps[-1])
    end = first_end + problem.passes[-1]
    idle = cycle(end, group.uses[0] - 1, problem.n_steps)
    last = len(idle) - 1
    external = problem.update == "external"
    barrier = idle.index(problem.first_turn_around)
    count.compute[end] += group.norm_s
    if external or group.side == "host" or (group.side == "any" and rng.random() < 0.5):
        first_update = barrier if external or (problem.gate and not problem.speculates) else 1
        update = barrier if external else rng.randint(first_update, last - 1)
        out = rng.randint(0, barrier if external else update - 1)
        speculated = problem.speculates and update < barrier
        back = rng.randint(max(update + 1, barrier * problem.speculates), last)
        stored = problem.may_update_from_files(group) and not speculated and rng.random() < 0.6
        away = stored and problem.values_beside_states
        count.move(problem, "out", idle[out], *grads(group), serial=out == 0)
        count.move(problem, "in", idle[back], *params(group), drive=away)
        count.cpu[idle[update]] += group.cpu_update_s + group.cpu_log_s * speculated
        if speculated:
            count.stay([idle[update : barrier + 1]], group.log_bytes)
        for k in range(1, last + 1):
            count.memory[idle[k]] += group.grad_bytes * (k <= out) + group.param_bytes * (k >= back)
        if stored:
            count.pass_through(problem, idle[update], *states(group), *(params(group) if away else ()))
        count.keep(group.param_bytes * (not away) + group.state_bytes * (not stored))
        place = BY_HOST_IN_FILES if away else BY_HOST
        if problem.sums_on_device:
            _count_totals(problem, group, rng, count, kept=True)
            return place
        if external or problem.micro_batches > 1:
            count.keep(group.grad_bytes)
        else:
            count.stay([idle[out : (barrier if speculated else update) + 1]], group.grad_bytes)
        if problem.micro_batches > 1:
            count.cpu[idle[out + 1]] += group.cpu_add_s
            _count_gradients_out(problem, group, first_end, rng, count)
        return place
    updated = problem.device_update(group)
    count.compute[updated] += group.device_update_s
    away = _count_wait(problem, group, end, updated, rng, count)
    for step in range((end if problem.sums_on_device else first_end) + 1, updated + 1):
        count.memory[step] += group.grad_bytes * (step not in away)
    if problem.sums_on_device:
        _count_totals(problem, group, rng, count, kept=bool(away))
    else:
        for start in problem.passes[1:]:
            count.compute[start + first_end] += group.device_add_s
    _count_states(problem, group, updated, rng, count)
    if rng.random() < 0.4:
        for step in idle[1:]:
            count.memory[step] += group.param_bytes
        count.keep(0 if problem.parameter_tiers else group.param_bytes)
        return False
    out = rng.randint(idle.index(updated), last)
    stored = bool(problem.parameter_tiers) and rng.random() < 0.6
    count.move(problem, "out", idle[out], *params(group), serial=idle[out] == updated, drive=stored)
    count.keep(0 if stored else group.param_bytes)
    back = rng.randint(out + 1, last) if out < last and rng.random() < 0.7 else None
    for k in range(1, last + 1):
        count.memory[idle[k]] += group.param_bytes * (back is None or k <= out or k >= back)
    if back is not None:
        count.move(problem, "in", idle[back], *params(group), drive=stored)
    return IN_FILES if stored else True


def _count_wait(problem: Problem, group: Group, end: int, updated: int, rng: random.Random, count: Count) -> range:
    """Behind a gate the whole gradient may leave once it is complete, and return once the gate is open."""
    returns = range(max(problem.first_turn_around, end + 2), updated) if problem.gate else range(0)
    if not returns or rng.random() < 0.4:
        return range(0)
    back = rng.choice(returns)
    out = rng.randrange(end, back - 1)
    count.move(problem, "out", out, *grads(group), serial=out == end)
    count.move(problem, "in", back, *grads(group))
    if problem.sums_on_device:
        pass  # kept together with what the total needs between passes
    elif problem.micro_batches > 1:
        count.keep(group.grad_bytes)
    else:
        count.stay([range(out, updated + 1)], group.grad_bytes)
    return range(out + 1, back)


def _count_totals(problem: Problem, group: Group, rng: random.Random, count: Count, *, kept: bool) -> None:
    """Each gradient is added on the device; between passes the total stays there, or leaves and returns.

    A step that adds has room for a gradient beside the total, or beside the one that it makes of a tied gradient.
    """
    end, tied = group.grad_steps[-1], len(group.grad_steps) > 1
    leaves = rng.random() < 0.5
    out = rng.randrange(end, end + problem.pass_steps - 2)
    back = rng.randrange(max(out + 1, end + 2), end + problem.pass_steps)
    for start in problem.passes[:-1]:
        for step in range(end + 1, end + problem.pass_steps + tied):
            count.memory[start + step] += group.grad_bytes * (not leaves or step <= out or step >= back)
        if leaves:
            count.move(problem, "out", start + out, *grads(group), serial=out == end)
            count.move(problem, "in", start + back, *grads(group))
    for start in problem.passes:
        count.compute[start + end] += (problem.slots_at(start) - (start == 0)) * group.device_add_s
    if kept or leaves:
        count.keep(group.grad_bytes)


def _count_gradients_out(problem: Problem, group: Group, end: int, rng: random.Random, count: Count) -> None:
    """The gradients of every micro-batch but the last leave before the next one's are made, and are added up."""
    again = problem.pass_steps + group.grad_steps[0]
    out = rng.randrange(end, again)
    for start in problem.passes[:-1]:
        count.move(problem, "out", start + out, *grads(group), serial=out == end)
        count.cpu[start + out + 1] += group.cpu_add_s
        for step in range(end + 1, out + 1):
            count.memory[start + step] += group.grad_bytes


def _count_states(problem: Problem, group: Group, updated: int, rng: random.Random, count: Count) -> None:
    steps = cycle(updated, updated - 1, problem.n_steps)
    # A middle pass ends with what it starts with.
    fixed = problem.passes[1:2] if problem.micro_batches > 2 else ()
    may = [k for k, step in enumerate(steps) if not any(m <= step < m + problem.pass_steps for m in fixed)]
    out = rng.choice(may[:-1])
    back = rng.choice([k for k in may if k > out])
    leaves = group.state_bytes and rng.random() < 0.7
    for k, step in enumerate(steps):
        count.memory[step] += group.state_bytes * (not leaves or k <= out or k >= back)
    if leaves:
        count.move(problem, "out", steps[out], *states(group), serial=out == 0)
        count.move(problem, "in", steps[back], *states(group))
        count.keep(group.state_bytes)


def count_group(problem: Problem, group: Group, rng: random.Random, count: Count) -> None:
    points = sorted({*group.uses, *group.grad_steps[-1:]})
    for start in problem.passes:
        for step in points:
            count.memory[start + step] += group.param_bytes
    gaps = [(after, before, problem.passes) for after, before in pairwise(points)]
    gaps.append((points[-1], problem.pass_steps + points[0], problem.passes[:-1]))
    on_host = count_idle_gap(problem, group, rng, count) if group.trainable else rng.random() < 0.7
    unread = range(0)
    if (
        on_host in (BY_HOST, BY_HOST_IN_FILES) and problem.n_passes == 1
    ):  # it need not be there for a gradient that does not read it
        unread = range(group.uses[-1] + 1, points[-1] + 1)
        for step in unread:
            count.memory[step] -= group.param_bytes
    if not group.trainable:
        gaps.append((points[-1] + problem.passes[-1], points[0], (0,)))
        count.keep(0 if problem.sources(group) and not on_host else group.param_bytes)
    for after, before, starts in gaps:
        between = cycle(after, before - 1, problem.n_steps)[1:] if starts else []
        returns = between and on_host and after + 1 not in unread
        back = rng.choice(between) if returns and rng.random() < 0.6 else None
        for start in starts:
            for k, step in enumerate(between):
                count.memory[start + step] += group.param_bytes * (back is None or k >= between.index(back))
            if back is not None:
                drive = on_host in (IN_FILES, BY_HOST_IN_FILES)
                count.move(problem, "in", start + back, *params(group), drive=drive)


def count_block(problem: Problem, i: int, option: Option, stay: tuple[int, int], start: int, count: Count) -> None:
    """A block whose option's offload leaves and returns so many steps after its forward and before its backward."""
    forward, backward = start + i, start + problem.backward_step(i)
    out, back = forward + stay[0], backward - stay[1]
    count.compute[forward] += option.forward_s * problem.share(forward)
    count.compute[backward] += option.backward_s * problem.share(backward)
    count.memory[forward] += option.forward_peak_bytes
    count.memory[backward] += option.backward_peak_bytes
    for step in range(forward + 1, backward):
        offloaded = step <= out or step >= back
        count.memory[step] += option.saved_bytes + option.offloaded_bytes * offloaded
    count.move_slots(problem, "out", out, option.offloaded_bytes, serial=out == forward)
    count.move_slots(problem, "in", back, option.offloaded_bytes, serial=back == backward)


def count_values(problem: Problem, rng: random.Random, count: Count) -> None:
    for value in problem.values:
        forwards = [value.made, *(u for u in value.uses if u < problem.n_blocks)]
        backwards = [u for u in value.uses if u >= problem.n_blocks]
        leaves = backwards and backwards[0] - forwards[-1] >= 3 and rng.random() < 0.5
        away = range(forwards[-1] + 1, backwards[0] - 1) if leaves else range(0)
        if leaves:
            count.stay([range(p + forwards[-1], p + backwards[0]) for p in problem.passes], value.bytes)
        for start in problem.passes:
            if leaves:
                count.move_slots(problem, "out", start + forwards[-1], value.bytes, serial=forwards[-1] == value.made)
                count.move_slots(problem, "in", start + backwards[0] - 1, value.bytes)
            for step in range(value.made + 1, value.uses[-1] + 1):
                count.memory[start + step] += value.bytes * (step not in away)


def random_plan(problem: Problem, rng: random.Random) -> tuple[float, float, float, float]:
    """A random whole-tensor plan: its seconds, its device bytes, its host bytes, and these where memory is shared."""
    total, n = problem.n_steps, problem.n_blocks
    zeros = [0.0] * total
    links_s: dict[str, list[float]] = defaultdict(lambda: list(zeros))
    count = Count(list(zeros), list(zeros), list(zeros), links_s, list(zeros), list(zeros))
    for group in problem.groups:
        count_group(problem, group, rng, count)
    count_values(problem, rng, count)
    held = held_bytes(problem)
    outside = [(count.memory[start], count.memory[start + n]) for start in problem.passes]
    for i, block in enumerate(problem.blocks):
        option = rng.choice([o for o in block.options if not o.offloaded_bytes or i <= n - 2])
        most = min(3, (problem.backward_step(i) - i - 1) // 2)
        stay = rng.randint(0, most), rng.randint(0, most)
        first, last = i + stay[0], problem.backward_step(i) - stay[1]
        count.stay([range(p + first, p + last + 1) for p in problem.passes], option.offloaded_bytes)
        for p, start in enumerate(problem.passes):
            before = count.memory[start + n]
            count_block(problem, i, option, stay, start, count)
            more = count.memory[start + n] - before if i < n - 1 else option.saved_bytes
            outside[p] = (outside[p][0], outside[p][1] + more)
    device = max(m + h for m, h in zip(count.memory, held))
    handed_in = sum(o.grad_bytes for o in problem.outputs if problem.backward_step(o.made) > n)
    for start, (at_start, at_user) in zip(problem.passes, outside):
        start_bytes = problem.start_peak_bytes - sum(s.bytes for s in problem.shared)
        device = max(device, at_start + held[start] + start_bytes)
        device = max(device, at_user + held[start + n] + problem.user_bytes - handed_in)
        count.compute[start] += problem.start_s * problem.share(start)
    count.compute[problem.first_turn_around] += problem.gate_s
    count.cpu[problem.first_turn_around] += problem.gate_s
    if problem.micro_batches > 1 and not problem.sums_on_device:
        count.keep(2 * max((t.grad_bytes for g in problem.groups if g.trainable for t in g.tensors), default=0))
    count.keep(problem.buffers_bytes)
    seconds = sum(_step_s(problem, count, t) * problem.times(t) for t in range(total))
    return seconds, device, count.host, count.always + max(count.passing)


def _step_s(problem: Problem, count: Count, t: int) -> float:
    rates, (came_s, went_s) = problem.rates, (count.link_s["in"][t], count.link_s["out"][t])
    parts = [
        count.compute[t] + count.serial_s[t],
        _both_s(rates.host, came_s, went_s),
        rates.manage_s + count.cpu[t],
    ]
    if rates.tiers:
        parts.append(_both_s(rates.tiers[0].path, count.link_s["read"][t], count.link_s["written"][t]))
    if rates.shared_cores:
        copies_s = came_s * rates.in_bytes_per_s + went_s * rates.out_bytes_per_s
        parts.append(count.compute[t] + count.cpu[t] + copies_s / rates.both_bytes_per_s)
    if rates.host_memory_bytes_per_s:
        # Of the memory's rate: the part that each needs at full speed, and its seconds at full speed.
        needs = (rates.in_bytes_per_s, rates.out_bytes_per_s, rates.worker_bytes_per_s)
        used = [(n / rates.host_memory_bytes_per_s, s) for n, s in zip(needs, (came_s, went_s, count.cpu[t]))]
        parts.append(sum(part * seconds for part, seconds in used))
        alone = [(min(1.0, part), max(1.0, part) * seconds) for part, seconds in used]
        parts += [
            seconds + sum(max(0.0, part + a - 1) * s for j, (a, s) in enumerate(alone) if j != i)
            for i, (part, seconds) in enumerate(alone)
        ]
    return max(parts)


def _both_s(path: Path, came_s: float, went_s: float) -> float:
    """Both at once as long as there is something for both, and never slower than one after the other."""
    slowed_s = max(0.0, (path.in_bytes_per_s + path.out_bytes_per_s) / path.both_bytes_per_s - 1)
    return max(came_s, went_s) + min(1.0, slowed_s) * min(came_s, went_s)


def with_seconds_per_copy(problem: Problem, rng: random.Random) -> Problem:
    """The problem on a machine where a copy of a tensor takes about as long as its bytes, in addition."""
    return replace(problem, rates=replace(problem.rates, per_copy_s=rng.choice([2e-4, 1e-3, 4e-3])))


def check_no_whole_plan_is_better(problem: Problem, rng: random.Random, backend: str = "highs") -> None:
    plans = [random_plan(problem, rng) for _ in range(400)]
    frontier = [min(plans), *(min(plans, key=lambda p, k=k: p[k]) for k in (1, 2, 3)), *rng.sample(plans, 2)]
    for in_time, (seconds, device, *hosts) in product((False, True), frontier):
        host = hosts[in_time]
        within = replace(problem, device_budget_bytes=int(device), host_budget_bytes=int(host), host_in_time=in_time)
        solution = solve(within, gap=1e-6, backend=backend)
        assert solution.status is Status.OPTIMAL
        assert solution.lower_bound_s <= seconds * (1 + 1e-6)
        assert solution.objective_s <= seconds + 2e-4 * seconds
        assert max(solution.memory_bytes) <= device
        assert solution.host_bytes <= host
        least = least_host_within_device(within, backend=backend)
        assert least is not None and least <= host * (1 + 2e-6) + 256
        assert solve(replace(within, host_budget_bytes=least), backend=backend).status is Status.OPTIMAL
    endless = replace(problem, host_budget_bytes=10**9)
    assert least_budget(endless, backend=backend).bytes <= min(p[1] for p in plans) * (1 + 2e-6) + 256
    for in_time in (False, True):
        least_bytes = least_host(replace(problem, host_in_time=in_time), backend=backend)
        assert least_bytes <= min(p[2 + in_time] for p in plans) * (1 + 2e-6) + 256


@pytest.mark.parametrize("seed", range(30))
def test_no_whole_plan_is_better(seed: int) -> None:
    rng = random.Random(seed)
    update = "external" if seed % 3 == 0 else "planned"
    problem = random_problem(rng, n_blocks=2, tensors=1, update=update, tied=seed % 2 == 0)  # type: ignore[arg-type]
    if seed % 5 == 0:
        problem = replace(problem, rates=replace(problem.rates, shared_cores=True))
    check_no_whole_plan_is_better(problem, rng)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_nor_is_one_by_the_other_backend(seed: int, m: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, n_blocks=2, tensors=1, tied=seed % 2 == 0)
    check_no_whole_plan_is_better(problem if m == 1 else gated(problem, rng, m), rng, "cbc")


@pytest.mark.parametrize("seed", range(3))
def test_no_whole_plan_is_better_in_a_longer_chain(seed: int) -> None:
    rng = random.Random(seed)
    check_no_whole_plan_is_better(random_problem(rng, n_blocks=6, tensors=1), rng)


@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_no_whole_plan_is_better_where_host_memory_is_slow(seed: int, m: int) -> None:
    rng = random.Random(seed)
    problem = limited(random_problem(rng, n_blocks=2, tensors=1, tied=seed % 2 == 0), rng)
    check_no_whole_plan_is_better(gated(problem, rng, m) if m else problem, rng)


@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_no_whole_plan_is_better_where_each_copy_takes_seconds_of_its_own(seed: int, m: int) -> None:
    rng = random.Random(seed)
    update = "external" if seed == 5 and not m else "planned"
    problem = random_problem(rng, n_blocks=2, tensors=2, update=update, tied=seed % 2 == 0)  # type: ignore[arg-type]
    problem = with_seconds_per_copy(in_rows(problem) if seed % 3 else problem, rng)
    if seed == 4:
        problem = replace(problem, rates=replace(problem.rates, shared_cores=True))
    check_no_whole_plan_is_better(gated(problem, rng, m) if m else problem, rng)


@pytest.mark.parametrize("m", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_no_whole_plan_is_better_behind_a_gate(seed: int, m: int) -> None:
    rng = random.Random(seed)
    problem = gated(random_problem(rng, n_blocks=2, tensors=1, tied=seed % 2 == 0), rng, m)
    groups = (replace(g, norm_s=1e-3 * (m == 1 and bool(g.grad_steps))) for g in problem.groups)
    check_no_whole_plan_is_better(replace(problem, groups=tuple(groups)), rng)


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_no_whole_plan_is_better_where_the_host_updates_before_the_gate(seed: int, m: int) -> None:
    rng = random.Random(seed)
    problem = gated(random_problem(rng, n_blocks=2, tensors=1, tied=seed % 2 == 0), rng, m)
    check_no_whole_plan_is_better(speculating(problem), rng)


@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_no_whole_plan_is_better_where_parameters_may_leave_to_files(seed: int, m: int) -> None:
    """Read for forwards and backwards, and written after each update, by a drive of other rates than the link's."""
    rng = random.Random(seed)
    problem = random_problem(rng, n_blocks=2, tensors=rng.choice((1, 2)), tied=seed % 2 == 0)
    rate = problem.rates.in_bytes_per_s
    path = Path("drive", rate * rng.choice((0.3, 2.0)), rate * 0.5, rate * 0.6, through_host=True)
    tier = Tier(path, 2**40, buffers_bytes=64, for_states=True, for_parameters=True)
    problem = replace(problem, rates=replace(problem.rates, tiers=(tier,)))
    check_no_whole_plan_is_better(gated(problem, rng, m) if m else problem, rng)


@pytest.mark.parametrize(("m", "per_step"), [(3, 2), (4, 2), (8, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_no_whole_plan_is_better_in_passes_of_several_micro_batches(seed: int, m: int, per_step: int) -> None:
    rng = random.Random(seed)
    one = gated(random_problem(rng, n_blocks=2, tensors=rng.choice((1, 2)), tied=seed % 2 == 0), rng, 1)
    problem = in_passes(with_seconds_per_copy(one, rng) if seed % 3 else one, m, per_step)
    check_no_whole_plan_is_better(problem, rng)


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_no_whole_plan_is_better_where_the_host_updates_states_in_files(seed: int, m: int, values: bool) -> None:
    """Read, updated and written in one step, behind the gate if there is one, through a ring in the host's memory.

    The parameters' values may lie beside them.
    """
    rng = random.Random(seed)
    problem = random_problem(rng, n_blocks=2, tensors=rng.choice((1, 2)), tied=seed % 2 == 0)
    problem = in_rows(problem) if seed % 2 else problem
    rate = problem.rates.in_bytes_per_s
    path = Path("drive", rate * rng.choice((0.5, 2.0)), rate, rate * 1.2, through_host=True)
    tier = Tier(path, 2**40, buffers_bytes=64, for_states=True, for_host_updates=True, for_parameters=values)
    problem = replace(problem, rates=replace(problem.rates, tiers=(tier,)))
    problem = gated(problem, rng, m) if m else problem
    check_no_whole_plan_is_better(speculating(problem) if m and seed == 3 else problem, rng)
