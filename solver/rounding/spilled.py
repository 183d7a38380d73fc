"""Whole tensors as a schedule, whose states leave to files where RAM has no room for them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .. import items
from ..decisions import Decisions, StateStay, TensorPlan
from ..problem import Problem
from ..resources import HOST, Tier
from ..schedule import Schedule
from ..scheduling.emit import build_schedule, host_bytes
from ..solution import Solution
from .cast import worth_casting
from .groups import round_solution
from .knapsack import select

_TRIES = 4  # the first states in files need buffers in RAM, and items that shared RAM may share less


def whole_schedule(problem: Problem, tried: Problem, solution: Solution, *, host_is_full: bool = False) -> Schedule:
    """Round a solution to whole tensors and schedule them.

    If they take more RAM than there is, further pieces of states leave to a tier for states instead, then further
    parameters are cast from their float32 copies, then the host updates further states from files, and then parameters
    leave there, as far as the tier is for these. That costs less than what the program gives up if it is solved again
    for less RAM.

    Parameters
    ----------
    tried: the problem that was solved, the same as `problem` but for budgets. host_is_full: see `round_solution`.
    """
    decisions = round_solution(tried, solution, host_is_full=host_is_full)
    schedule = build_schedule(problem, decisions)
    files = [tier for tier in problem.state_tiers if tier.for_states]
    for _ in range(_TRIES if files else 0):
        over = schedule.host_layout.used_bytes - problem.host_budget_bytes
        further = _in_files(problem, decisions, files[0], over) if over > 0 else None
        if further is None:
            break
        decisions, schedule = further, build_schedule(problem, further)
    over = schedule.host_layout.used_bytes - problem.host_budget_bytes
    cast = _cast(problem, decisions, over) if over > 0 else None
    if cast is not None:
        decisions, schedule = cast, build_schedule(problem, cast)
    stored = problem.host_update_tier
    for _ in range(_TRIES if stored is not None else 0):
        over = schedule.host_layout.used_bytes - problem.host_budget_bytes
        further = _updated_from(problem, decisions, stored, over) if stored is not None and over > 0 else None
        if further is None:
            break
        decisions, schedule = further, build_schedule(problem, further)
    over = schedule.host_layout.used_bytes - problem.host_budget_bytes
    for tier in problem.parameter_tiers if over > 0 else ():
        further = _parameters_in(problem, decisions, tier, over)
        schedule = build_schedule(problem, further) if further is not None else schedule
    return schedule


def _cast(problem: Problem, decisions: Decisions, over_bytes: int) -> Decisions | None:
    """Have further parameters come from their float32 copies, by whose bytes RAM exceeds its budget.

    Returns: None if none can.
    """
    tier = problem.cast_tier
    if tier is None:
        return None
    groups = filter(problem.may_cast, problem.groups)
    sizes = {name: size for group in groups for name, size in worth_casting(group).items()}
    here = {plan.name: sizes[plan.name] for plan in decisions.tensors if plan.may_be_cast and plan.name in sizes}
    if all(plan.source != tier.name for plan in decisions.tensors):
        over_bytes += tier.buffers_bytes
    going = select(here, min(over_bytes, sum(here.values())))
    if not going:
        return None
    tensors = (replace(plan, source=tier.name) if plan.name in going else plan for plan in decisions.tensors)
    return replace(decisions, tensors=tuple(tensors))


def _updated_from(problem: Problem, decisions: Decisions, files: Tier, over_bytes: int) -> Decisions | None:
    """Have the host update further states from files instead of RAM, by whose bytes it exceeds its budget.

    Returns: None if none can go.
    """
    groups = [group for group in problem.groups if group.trainable and problem.may_update_from_files(group)]
    beside = problem.values_beside_states
    sizes = {t.name: t.state_bytes + t.param_bytes * beside for group in groups for t in group.tensors}
    by_name = {group.name: group for group in groups}
    on_host = [plan for plan in decisions.tensors if plan.cpu and sizes.get(plan.name)]
    slots = {p.name: 1 + problem.is_logged(by_name[p.group], p.cpu_update or 0) for p in on_host}
    here = {plan.name: slots[plan.name] * sizes[plan.name] for plan in on_host if plan.states_from is None}
    there = sum(slots[plan.name] * sizes[plan.name] for plan in on_host if plan.states_from is not None)
    if not there:  # the first one needs the ring
        over_bytes += problem.ring_bytes
    going = select(here, min(over_bytes, sum(here.values())))
    if not going or there + sum(here[name] for name in going) > files.capacity_bytes:
        return None
    tensors = (p.updated_from(files.name, with_values=beside) if p.name in going else p for p in decisions.tensors)
    return replace(decisions, tensors=tuple(tensors))


def _parameters_in(problem: Problem, decisions: Decisions, files: Tier, over_bytes: int) -> Decisions | None:
    """Send parameters that the device updates to files instead of RAM, by whose bytes it exceeds its budget.

    Returns: None if none can go.
    """
    sizes = {tensor.name: tensor.param_bytes for group in problem.groups for tensor in group.tensors}
    trained = [plan for plan in decisions.tensors if plan.device_update is not None and plan.has_copy]
    here = {plan.name: sizes[plan.name] for plan in trained if plan.source == HOST}
    used = {plan.source for plan in trained} | {stay.tier for plan in decisions.tensors for stay in plan.states}
    over_bytes += 0 if files.name in used else files.buffers_bytes
    going = select(here, min(over_bytes, sum(here.values())))
    if not going:
        return None
    tensors = (replace(plan, source=files.name) if plan.name in going else plan for plan in decisions.tensors)
    return replace(decisions, tensors=tuple(tensors))


def _in_files(problem: Problem, decisions: Decisions, files: Tier, over_bytes: int) -> Decisions | None:
    """Send pieces of states that leave to RAM to files instead, by whose bytes it exceeds its budget.

    Returns: None if none can go.
    """
    tensors = {tensor.name: tensor for group in problem.groups for tensor in group.tensors}
    stays = {items.state(plan.name, stay.rows): stay for plan in decisions.tensors for stay in plan.states}
    sizes: dict[str, int] = {item: tensors[item.name].piece_bytes(stay.rows) for item, stay in stays.items()}
    here: dict[str, int] = {item: sizes[item] for item, stay in stays.items() if stay.tier == HOST}
    there: set[str] = {item for item, stay in stays.items() if stay.tier == files.name}
    if here and not there:  # with the first one, RAM no longer reserves whole states
        first = min(here, key=lambda item: (here[item], item))
        with_first = host_bytes(problem, _moved(decisions, {first}, files))
        over_bytes -= host_bytes(problem, decisions) - with_first - here[first]
    going = select(here, min(max(over_bytes, 1), sum(here.values())))
    if not going or sum(sizes[item] for item in there | going) > files.capacity_bytes:
        return None
    return _moved(decisions, going, files)


def _moved(decisions: Decisions, going: Collection[str], files: Tier) -> Decisions:
    """Return decisions by which some pieces of states leave to files."""

    def moved(plan: TensorPlan, stay: StateStay) -> StateStay:
        return replace(stay, tier=files.name) if items.state(plan.name, stay.rows) in going else stay

    tensors = (replace(plan, states=tuple(moved(plan, stay) for stay in plan.states)) for plan in decisions.tensors)
    return replace(decisions, tensors=tuple(tensors))
