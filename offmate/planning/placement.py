"""Fits plans to the device's allocator, which keeps every tensor in one piece and rounds its size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from ..capture.spec import LowPrecision
from ..errors import InfeasibleBudget
from ..machines.allocations import DeviceAllocationLog
from ..optim.low import updated_in
from ..optim.state_bytes import state_parts
from ..optim.updater import Updater
from ..plans.plan import Plan
from ..runtime.memory.changes import Rehearsal
from ..runtime.memory.reserve import MemoryLayout, Reserved, make_pockets, reserve, serves
from ..runtime.memory.updated import Updated
from ..runtime.replay.rehearsal import rehearse
from ..runtime.torch_names import trees as pytree
from ..sizes import format_bytes, format_least_bytes
from .request import Prepared

log = logging.getLogger("offmate")

_PROBED_ELEMENTS = 1 << 18  # size of the tensor on which an update's workspace is measured
_PLANS = 6  # plans tried until one fits; after these comes the one that takes the least


def fitted(
    make: Callable[[int], Prepared],
    model: torch.nn.Module,
    updater: Updater | None,
    device: torch.device,
    budget_bytes: int,
) -> tuple[Prepared, MemoryLayout]:
    """Find a plan whose allocations fit into the budget on this device, and where they come from.

    Plans take less and less of the budget until one can be placed. The last one takes the least that any can, so that
    a budget is refused only if every smaller one is.

    Parameters
    ----------
    make: plans with that many bytes of the budget left to the allocator.

    Returns: the plan, in which the bytes that the allocator needs beyond its tensors count as fixed; and the place.
    Raises: InfeasibleBudget if none fits.
    """
    margin, prepared, tried = 0, make(0), 1
    while True:
        updated, plan = holdings(model, updater, device, prepared.low), prepared.plan
        found = reserve(device, rehearsals(prepared, model, updated), budget_bytes)
        if isinstance(found, Reserved):
            place = replace(found.place, updated={name: updated(name) for name in plan.schedule.update_device_s})
            log.info("%s per iteration are moved within GPU memory, to make room", format_bytes(place.moved_bytes))
            least = _least_that_works(make, model, updated, device, budget_bytes, prepared)
            return _placed(prepared, found, least), place
        least_taken = plan.least_budget_bytes - plan.allocator_bytes
        if margin >= budget_bytes - least_taken:
            break
        needed = max(found.needed_bytes, budget_bytes * 101 // 100)
        log.info("a plan needs %s, including gaps in the allocator's memory", format_bytes(needed))
        # Gaps are roughly proportional to what the plan really takes, which may be less than its budget.
        taken = (plan.predicted_peak_bytes - plan.allocator_bytes) * budget_bytes // needed
        margin = budget_bytes - (max(taken, least_taken) if tried < _PLANS else least_taken)
        try:
            prepared, tried = make(margin), tried + 1
        except InfeasibleBudget:
            break
    works = _seen_to_work(device, rehearsals(prepared, model, updated), found.needed_bytes)
    raise _refusal(budget_bytes, works or found.needed_bytes, plan)


def has_place(
    place: MemoryLayout, prepared: Prepared, model: torch.nn.Module, updater: Updater | None, device: torch.device
) -> bool:
    """Return whether the iterations of a plan can be held in the layout of another one, whose actions it takes."""
    return serves(place, rehearsals(prepared, model, holdings(model, updater, device, prepared.low)))


def _least_that_works(
    make: Callable[[int], Prepared],
    model: torch.nn.Module,
    updated: Callable[[str], Updated],
    device: torch.device,
    budget_bytes: int,
    prepared: Prepared,
) -> int:
    """Return the least budget in which a plan was seen to be placed: that of the plan that takes the least.

    Parameters
    ----------
    budget_bytes: works with the plan in `prepared`.
    """
    plan = prepared.plan
    margin = budget_bytes - (plan.least_budget_bytes - plan.allocator_bytes)
    try:
        smallest = make(margin) if margin > plan.allocator_bytes else prepared
    except InfeasibleBudget:
        return budget_bytes
    least = _seen_to_work(device, rehearsals(smallest, model, updated), 0)
    return budget_bytes if least is None else min(least, budget_bytes)


def _seen_to_work(device: torch.device, starts: tuple[Rehearsal, ...], least_bytes: int) -> int | None:
    """Return a budget, at least `least_bytes`, in which this iteration was placed; None if a few tries find none."""
    for _ in range(_PLANS):
        found = reserve(device, starts, least_bytes)
        if isinstance(found, Reserved):
            return least_bytes
        least_bytes = max(found.needed_bytes, least_bytes * 101 // 100)
    return None


def pockets(device: torch.device, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    """Reserve places on the device for tensors outside any plan: the user's batches and scalars, optimizer scalars.

    Returns: tensors that keep the places apart; hold them for as long as plans are replayed.
    """
    # Per parameter, the scalars of its state, and its norm while gradients are clipped.
    numbers = 2 * sum(1 for _ in model.parameters())
    leaves = pytree.tree_leaves(batch)
    return make_pockets(device, numbers, [leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)])


def rehearsals(prepared: Prepared, model: torch.nn.Module, updated: Callable[[str], Updated]) -> tuple[Rehearsal, ...]:
    """Rehearse an iteration of the plan from every state in which it may start.

    Parameters
    ----------
    updated: returns what the optimizer holds of a parameter.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    buffer_bytes = [buffers[name].nbytes for name in prepared.binding.buffers]
    return tuple(
        rehearse(prepared.plan.schedule, prepared.binding, updated, buffer_bytes, fresh=fresh)
        for fresh in (True, False)
    )


def holdings(
    model: torch.nn.Module,
    updater: Updater | None,
    device: torch.device,
    low: Mapping[str, LowPrecision] = MappingProxyType({}),
) -> Callable[[str], Updated]:
    """Return a function that tells what an optimizer holds of a parameter, measured on the device once per kind.

    Parameters
    ----------
    low: parameters that move in a lower precision. Those that move as copies are themselves a part of their state.
    """
    params = dict(model.named_parameters())
    held: dict[str, Updated] = {}
    per_element: dict[Any, int] = {}

    def updated(name: str) -> Updated:
        if name not in held:
            assert updater is not None, "without an optimizer no schedule moves states"
            param, hyper = params[name], updater.groups[name]
            key = param.dtype, low.get(name), id(hyper)
            if key not in per_element:
                per_element[key] = _workspace_share(updater, param.dtype, hyper, device, low.get(name))
            parts, _ = state_parts(updater, param, hyper)
            whole = (param.nbytes,) if name in low and low[name].copied else ()
            held[name] = Updated((*whole, *parts), param.numel() * per_element[key], len(whole))
        return held[name]

    return updated


def _workspace_share(
    updater: Updater, dtype: torch.dtype, hyper: dict[str, Any], device: torch.device, low: LowPrecision | None
) -> int:
    """Measure the bytes per element that an update takes on the device while it runs."""
    param, grad, state = updated_in(low, torch.zeros(_PROBED_ELEMENTS, dtype=dtype, device=device))
    updater.step_one(hyper, param, grad, state)
    with DeviceAllocationLog(device) as log:
        log.stretch("update", lambda: updater.step_one(hyper, param, grad, state))
    # Scalars are small compared to these; they go where the user's scalars go.
    return log.workspace_bytes()["update"] // _PROBED_ELEMENTS


def _placed(prepared: Prepared, reserved: Reserved, least_bytes: int) -> Prepared:
    plan = prepared.plan
    tensors = plan.predicted_peak_bytes - plan.allocator_bytes
    allocator = reserved.bytes - tensors
    placed = replace(
        plan,
        fixed_bytes=plan.fixed_bytes - plan.allocator_bytes + allocator,
        least_budget_bytes=least_bytes,
        allocator_bytes=allocator,
    )
    return replace(prepared, plan=placed)


def _refusal(budget_bytes: int, needed_bytes: int, plan: Plan) -> InfeasibleBudget:
    tensors = plan.predicted_peak_bytes - plan.allocator_bytes
    free = plan.problem is None or all(group.side == "any" for group in plan.problem.groups)
    pinned = "" if free else ", or use Config(updates='auto'), which can change the last bits"
    return InfeasibleBudget(
        f"no plan fits a budget of {format_bytes(budget_bytes)}: the smallest one needs {format_bytes(tensors)} for "
        f"its tensors, and more for the gaps between them; {format_least_bytes(needed_bytes)} is enough. Raise "
        f"gpu_budget or make the batch smaller{pinned}",
        budget_bytes=budget_bytes,
        least_budget_bytes=needed_bytes,
    )
