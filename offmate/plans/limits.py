"""The limits of a plan, and the changes that would lift them."""

from __future__ import annotations

from ..solver.explain import Explanation, explanation, offered
from ..solver.problem import Problem
from ..solver.schedule import Schedule
from ..solver.simulate import Simulation


def endless_s(problem: Problem) -> float:
    """Return the seconds of one iteration in unlimited memory: fastest option per block, all updates on the device."""
    blocks_s = sum(min(o.forward_s + o.backward_s for o in block.options) for block in problem.blocks)
    passes_s = problem.micro_batches * (problem.start_s + blocks_s)
    return passes_s + sum(group.device_update_s for group in problem.groups)


def limits(
    problem: Problem, schedule: Schedule, simulation: Simulation, lower_bound_s: float, gap: float, offers: bool
) -> Explanation:
    """Explain what limits a plan in each phase, and, with `offers`, what some changes would gain.

    Parameters
    ----------
    schedule, simulation: of the plan. lower_bound_s, gap: what the solver has proved about it.
    """
    # If the solver has proved nothing, the gap is 1 and says nothing about the solution.
    objective_s = lower_bound_s / (1 - gap) if gap < 1 else simulation.step_s
    return explanation(schedule, simulation, gap, offered(problem, objective_s) if offers else ())
