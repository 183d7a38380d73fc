"""Algorithm 1 of the paper: the program's fractions become whole tensors that keep the budgets."""

from __future__ import annotations

from dataclasses import replace

from .problem import Problem
from .refine import Limits, Search, candidate
from .resources import HOST
from .rounding.groups import round_solution
from .rounding.settle import settle
from .scheduling.emit import build_schedule
from .simulate import keeps_budgets, memory_highs
from .solution import Solution
from .solve import solve

_TRIES = 8
# Parts of the host's and of the device's budget that are left to whole tensors, one after the other.
_ROOMS = ((0.0, 0.0), (0.02, 0.0), (0.02, 0.03), (0.05, 0.0), (0.05, 0.03))


def algorithm_1(problem: Problem, solution: Solution, limits: Limits) -> Search | None:
    """Round the program's answer to whole tensors; None if no smaller budget gives a plan within the problem's."""
    tried = problem
    for attempt in range(1, _TRIES + 1):
        rounded = build_schedule(problem, round_solution(tried, solution))
        if keeps_budgets(problem, rounded):
            return Search(problem, tried, solution, limits, (candidate(solution, rounded, rounded),))
        device = max(memory_highs(rounded)) - problem.device_budget_bytes
        over = {tier.name: used - tier.capacity_bytes for tier, used in rounded.tiers}
        tried = replace(tried, device_budget_bytes=max(0, tried.device_budget_bytes - attempt * max(0, device)))
        tried = tried.with_capacities(
            {tier.name: max(0, tier.capacity_bytes - attempt * max(0, over[tier.name])) for tier in tried.tiers}
        )
        solution = solve(tried, time_limit_s=limits.time_limit_s, gap=limits.gap, backend=limits.backend)
        if not solution.options:
            return None
    return None


def near_the_fractions(problem: Problem, solution: Solution, limits: Limits) -> Search | None:
    """Find whole tensors near the program's answer with everything else solved again; None if they do not fit either.

    Where the host is nearly full and a group has one large tensor, as an embedding, the answers to smaller and smaller
    budgets are soon none at all. Whole parts near the fractions, larger and smaller ones in turn, take no more bytes.
    """
    for on_host, on_device in _ROOMS:
        tried = problem.with_capacities({HOST: int((1 - on_host) * problem.host_budget_bytes)})
        tried = replace(tried, device_budget_bytes=int((1 - on_device) * problem.device_budget_bytes))
        limit_s, gap, backend = limits.time_limit_s, limits.gap, limits.backend
        for near in settle(tried, solution, time_limit_s=limit_s, gap=gap, backend=backend):
            rounded = build_schedule(problem, round_solution(tried, near))
            if keeps_budgets(problem, rounded):
                return Search(problem, tried, solution, limits, (candidate(near, rounded, rounded),))
    return None
