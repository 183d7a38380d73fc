"""Plans that fit the device's allocator, which needs every tensor in one piece and rounds its size."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from .errors import InfeasibleBudget
from .request import Prepared
from .runtime.rehearsal import rehearse
from .runtime.reserve import Reserved, reserve
from .sizes import format_bytes

log = logging.getLogger("offmate")

_MARGINS_PERCENT = (
    0,
    1,
    1,
    1,
    2,
    2,
    3,
    3,
    4,
    4,
    5,
    6,
)  # of the budget by which more is left to the allocator, until a plan fits


def fitted(
    make: Callable[[int], Prepared],
    model: torch.nn.Module,
    device: torch.device,
    budget_bytes: int,
    segment_bytes: int = 0,
) -> tuple[Prepared, int]:
    """A plan whose allocations fit into the budget on this device, and the bytes of the segment they come from.

    Parameters
    ----------
    make: plans with so many bytes of the budget left to the allocator. segment_bytes: the least that other plans need.

    Returns: the plan, what the allocator needs beyond its tensors counted as bytes that no decision changes.
    Raises: InfeasibleBudget if none fits.
    """
    elements = {name: param.numel() for name, param in model.named_parameters()}
    margin = 0
    for percent in _MARGINS_PERCENT:
        margin += budget_bytes * percent // 100
        prepared = make(margin)
        plan, sizes = prepared.plan, prepared.plan.schedule.item_bytes
        parts = {name: state_parts(sizes.get(f"s:{name}", 0), n) for name, n in elements.items()}
        starts = tuple(
            rehearse(plan.schedule, prepared.binding, parts.__getitem__, fresh=fresh) for fresh in (True, False)
        )
        found = reserve(device, starts, budget_bytes, segment_bytes)
        if isinstance(found, Reserved):
            allocator = found.bytes - (plan.predicted_peak_bytes - plan.allocator_bytes)
            fixed = plan.fixed_bytes - plan.allocator_bytes + allocator
            plan = replace(plan, fixed_bytes=fixed, allocator_bytes=allocator)
            return replace(prepared, plan=plan), found.segment_bytes
        log.info("the allocator cannot place a plan that leaves %s of the budget to it", format_bytes(margin))
        # A plan for less also needs its bytes at other times.
        margin += found.bytes // 2
    raise InfeasibleBudget(
        f"no plan could be placed in a budget of {format_bytes(budget_bytes)}: the last one leaves "
        f"{format_bytes(margin)} of it to the allocator, which still has no pieces large enough. Raise gpu_budget or "
        "make the batch smaller",
        budget_bytes=budget_bytes,
    )


def state_parts(state_bytes: int, elements: int) -> list[int]:
    """Bytes of the tensors that a state is made of: as many of the parameter's shape in float32 as it could hold."""
    for size in (4 * elements, 2 * elements):
        if size and state_bytes % size == 0:
            return [size] * (state_bytes // size)
    return [state_bytes]
