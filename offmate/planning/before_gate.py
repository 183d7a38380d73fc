"""A plan whose updates wait for the gate, compared with one that lets the host update before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..errors import InfeasibleBudget
from ..machines.devices import EMULATED
from ..plans.break_even import alone, break_even
from ..plans.plan import Plan
from .request import Request


def with_break_even(plan: Plan, planned: Callable[[Request], Plan], request: Request, elsewhere: bool) -> Plan:
    """Return the plan with its comparison to one that has updates before the gate, if the request asks for both.

    Parameters
    ----------
    plan: one whose updates wait. planned: plans by a request, for the same batch. elsewhere: whether it is a plan for
        another machine.
    """
    if not request.chooses:
        return plan
    early = request.speculating(True)
    if (elsewhere or request.device != EMULATED) and early.config.updates not in ("host", "device"):
        # A session does the same: there, a parameter that changes sides would be updated with other bits.
        early = replace(early, config=replace(early.config, updates=plan.split))
    try:
        figures = break_even(plan.schedule, planned(early).schedule)
    except InfeasibleBudget:
        figures = alone(plan.schedule)
    return replace(plan, break_even=figures)
