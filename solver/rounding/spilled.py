"""Whole tensors as a schedule, whose states leave to files where RAM has no room for them."""

from __future__ import annotations

from dataclasses import replace

from ..decisions import Decisions
from ..problem import Problem
from ..resources import HOST, Tier
from ..schedule import Schedule
from ..scheduling.emit import build_schedule
from ..solution import Solution
from .groups import round_solution
from .knapsack import select

_TRIES = 4  # the first states in files need buffers in RAM, and items that shared RAM may share less


def whole_schedule(problem: Problem, tried: Problem, solution: Solution, *, host_is_full: bool = False) -> Schedule:
    """Round a solution to whole tensors and schedule them.

    If they take more RAM than there is, states of further tensors leave to a tier for states instead. That costs less
    than what the program gives up if it is solved again for less RAM.

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
    return schedule


def _in_files(problem: Problem, decisions: Decisions, files: Tier, least_bytes: int) -> Decisions | None:
    """Send states that leave to RAM to files instead, of as many tensors as take these bytes; None if none can go."""
    sizes = {tensor.name: tensor.state_bytes for group in problem.groups for tensor in group.tensors}
    there = {plan.name for plan in decisions.tensors if any(stay.tier == files.name for stay in plan.states)}
    here = {plan.name: sizes[plan.name] for plan in decisions.tensors if any(stay.tier == HOST for stay in plan.states)}
    going = select(here, min(least_bytes, sum(here.values())))
    if not going or sum(sizes[name] for name in there | going) > files.capacity_bytes:
        return None
    tensors = tuple(
        replace(plan, states=tuple(replace(stay, tier=files.name) for stay in plan.states))
        if plan.name in going
        else plan
        for plan in decisions.tensors
    )
    return replace(decisions, tensors=tensors)
