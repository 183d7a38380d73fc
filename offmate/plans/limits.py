"""What limits a plan, and what would lift the limit."""

from __future__ import annotations

from ..solver.explain import Explanation, explanation, offered
from ..solver.problem import Problem
from ..solver.schedule import Schedule
from ..solver.simulate import Simulation


def endless_s(problem: Problem) -> float:
    """Seconds of one iteration in endless device memory: every block's fastest option, every update on the device."""
    blocks_s = sum(min(o.forward_s + o.backward_s for o in block.options) for block in problem.blocks)
    passes_s = problem.micro_batches * (problem.start_s + blocks_s)
    return passes_s + sum(group.device_update_s for group in problem.groups)


def limits(
    problem: Problem, schedule: Schedule, simulation: Simulation, lower_bound_s: float, gap: float, offers: bool
) -> Explanation:
    """What limits a plan in each phase, and if asked what some changes would buy.

    Parameters
    ----------
    schedule, simulation: of the plan. lower_bound_s, gap: what the solver has proved of it.
    """
    # Where the solver has proved nothing, the gap is 1 and says nothing of what it found.
    objective_s = lower_bound_s / (1 - gap) if gap < 1 else simulation.step_s
    return explanation(schedule, simulation, gap, offered(problem, objective_s) if offers else ())
