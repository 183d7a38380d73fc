"""RAM for everything that comes back from the device: whether a plan's budget has room for it."""

from __future__ import annotations

from ..planning.request import Request
from ..plans.plan import Plan
from ..sizes import format_bytes


def short_of_ram(plan: Plan, request: Request) -> str:
    """Say what RAM has to hold whenever everything comes back from the device, if that is more than its budget.

    Returns: an empty string if the budget has room for it.
    """
    rest_bytes, budget_bytes = plan.schedule.rest_bytes, request.host_budget_bytes
    if rest_bytes <= budget_bytes:
        return ""
    remedy = ", or name a folder on a drive with storage=, so that optimizer states go there"
    return (
        f"this plan trains with {format_bytes(plan.host_bytes)} of RAM, but needs {format_bytes(rest_bytes)} "
        "when values that stay on the GPU are copied back: for sync(), state_dict() and checkpoints, and before "
        f"another plan runs, as for an evaluation. That is more than the {format_bytes(budget_bytes)} of cpu_budget. "
        f"Make sure that so much RAM is free{remedy if request.storage is None else ''}"
    )
