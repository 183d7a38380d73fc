"""What limits a plan, and what would lift the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..solver.explain import Explanation, explain
from ..solver.plan import Planned
from ..solver.problem import Problem
from ..solver.solution import Solution, Status

if TYPE_CHECKING:
    from .plan import Plan


def endless_s(problem: Problem) -> float:
    """Seconds of one iteration in endless device memory: every block's fastest option, every update on the device."""
    blocks_s = sum(min(o.forward_s + o.backward_s for o in block.options) for block in problem.blocks)
    passes_s = problem.micro_batches * (problem.start_s + blocks_s)
    return passes_s + sum(group.device_update_s for group in problem.groups)


def limits(plan: Plan, offers: bool) -> Explanation:
    """What limits a plan in each phase, and if asked what some changes would buy.

    Parameters
    ----------
    plan: one with its problem.
    """
    assert plan.problem is not None
    # Where the solver has proved nothing, the gap is 1 and says nothing of what it found.
    objective_s = plan.lower_bound_s / (1 - plan.gap) if plan.gap < 1 else plan.predicted_step_s
    solution = Solution(Status.OPTIMAL, objective_s, plan.lower_bound_s, plan.gap, 0.0)
    return explain(plan.problem, Planned(solution, plan.schedule, plan.simulation, 0.0), offers=offers)
