"""Algorithm 1 of the paper: the program's fractions become whole tensors that keep the budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .polish.improve import improve
from .problem import Problem
from .refine import Limits, Search, candidate
from .resources import HOST
from .rounding.least_host import settle_least_host
from .rounding.settle import Resolver, settle
from .rounding.spilled import whole_schedule
from .schedule import Schedule
from .simulate import keeps_budgets, memory_highs, simulate
from .solution import Solution
from .solve import solve

_TRIES = 8
_WORTH = (
    0.02  # of the program's seconds that smaller budgets must cost for whole tensors near the fractions to be found
)
# Parts of the host's and of the device's budget that are left to whole tensors, one after the other.
_ROOMS = ((0.0, 0.0), (0.02, 0.0), (0.02, 0.03), (0.05, 0.0), (0.05, 0.03))
# Parts of the host's budget that are left where items share it, whose stays count in whole steps.
_SHARED_ROOMS = (0.0, 0.02, 0.05, 0.1)


def algorithm_1(problem: Problem, solution: Solution, limits: Limits) -> Search | None:
    """Round the program's answer to whole tensors.

    If they need more than the budgets, the program is solved again with smaller ones. If they need more of the host's
    and that costs time, or gives no plan, whole tensors near the fractions are found, too.

    Returns: None if neither gives a plan within the problem's budgets.
    """
    rounded = whole_schedule(problem, problem, solution)
    if keeps_budgets(problem, rounded):
        return Search(problem, problem, solution, limits, (candidate(solution, rounded, rounded),))
    smaller = _with_smaller_budgets(problem, solution, rounded, limits)
    if rounded.host_layout.used_bytes <= problem.host_budget_bytes:
        return smaller
    if smaller is not None and simulate(improve(smaller.best.schedule)).step_s <= (1 + _WORTH) * solution.objective_s:
        return smaller
    near = near_the_fractions(problem, solution, limits, host_is_full=True)
    if near is None or smaller is None:
        return near or smaller
    return replace(near, found=(*near.found, *smaller.found))


def _with_smaller_budgets(problem: Problem, solution: Solution, rounded: Schedule, limits: Limits) -> Search | None:
    """Solve again with budgets that are smaller by what whole tensors exceed them; None if no such plan fits."""
    tried = problem
    for attempt in range(1, _TRIES):
        device = max(memory_highs(rounded)) - problem.device_budget_bytes
        over = {tier.name: used - tier.capacity_bytes for tier, used in rounded.tiers}
        tried = replace(tried, device_budget_bytes=max(0, tried.device_budget_bytes - attempt * max(0, device)))
        tried = tried.with_capacities(
            {tier.name: max(0, tier.capacity_bytes - attempt * max(0, over[tier.name])) for tier in tried.tiers}
        )
        solution = solve(tried, time_limit_s=limits.time_limit_s, gap=limits.gap, backend=limits.backend)
        if not solution.options:
            return None
        rounded = whole_schedule(problem, tried, solution)
        if keeps_budgets(problem, rounded):
            return Search(problem, tried, solution, limits, (candidate(solution, rounded, rounded),))
    return None


def near_the_fractions(
    problem: Problem, solution: Solution, limits: Limits, *, host_is_full: bool = False
) -> Search | None:
    """Find whole tensors near the program's answer with everything else solved again; None if they do not fit either.

    Where the host is nearly full and a group has one large tensor, as an embedding, the answers to smaller and smaller
    budgets are soon none at all. Whole parts near the fractions, larger and smaller ones in turn, take no more bytes.

    Parameters
    ----------
    host_is_full: whether rounding has to keep to the host's budget, too: states then leave as whole tensors, and if
        nothing near the fractions fits, the whole tensors with the fewest bytes on the host are tried.
    """
    how: dict[str, Any] = {"time_limit_s": limits.time_limit_s, "gap": limits.gap, "backend": limits.backend}
    for on_host, on_device in _ROOMS:
        tried = problem.with_capacities({HOST: int((1 - on_host) * problem.host_budget_bytes)})
        tried = replace(tried, device_budget_bytes=int((1 - on_device) * problem.device_budget_bytes))
        settled, resolver = False, Resolver(tried, solution, **how)
        for near in settle(resolver, host_is_full=host_is_full):
            settled = True
            rounded = whole_schedule(problem, tried, near, host_is_full=host_is_full)
            if keeps_budgets(problem, rounded):
                found = (candidate(near, rounded, rounded),)
                return Search(problem, tried, solution, limits, found, host_is_full, resolver)
        if host_is_full and not settled:  # nor will anything with less memory be
            break
    return _fewest_on_host(problem, solution, limits) if host_is_full else None


def _fewest_on_host(problem: Problem, solution: Solution, limits: Limits) -> Search | None:
    """Find the whole tensors with the fewest bytes on the host; None if they do not fit, or are too many to count."""
    rooms = _SHARED_ROOMS if problem.host_in_time else (0.0,)
    budgets_bytes = tuple(int((1 - room) * problem.host_budget_bytes) for room in rooms)
    for near in settle_least_host(problem, solution, budgets_bytes, limits.time_limit_s, limits.gap, limits.backend):
        rounded = whole_schedule(problem, problem, near, host_is_full=True)
        if keeps_budgets(problem, rounded):
            return Search(problem, problem, solution, limits, (candidate(near, rounded, rounded),), host_is_full=True)
    return None
