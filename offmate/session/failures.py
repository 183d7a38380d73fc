"""Error messages for failed iterations: what was planned, what the device reports, and what can still be read."""

from __future__ import annotations

import torch

from ..errors import BudgetExceeded, DeviceError, OffmateError, StorageError
from ..plans.plan import Plan
from ..runtime.events import ActionFailed
from ..runtime.ledger import LimitExceeded
from ..runtime.operators.checks import OtherPath
from ..sizes import format_bytes
from .host_state import Truth


def described(
    error: Exception, device: torch.device, budget_bytes: int, plan: Plan | None, truth: Truth
) -> OffmateError:
    """Build the error for the user, once everything has been brought to a state that can be read.

    Parameters
    ----------
    error: what a part of the schedule raised. plan: that of the training iteration, if there is one yet.
    """
    if isinstance(error, LimitExceeded):
        return BudgetExceeded(f"the iteration would exceed the GPU memory budget: {error}. {_readable(truth)}")
    if isinstance(error, torch.OutOfMemoryError):
        return BudgetExceeded(f"{out_of_memory(device, budget_bytes, plan)}. {_readable(truth)}. ({error})")
    # The other types are for whoever looks for the cause in their own code.
    name = "" if isinstance(error, OtherPath | ActionFailed | OffmateError) else f"{type(error).__name__}: "
    words = f"the iteration failed: {name}{error}. {_readable(truth)}"
    # The failure of a worker has the original error as its cause.
    causes = (error, error.__cause__)
    if any(isinstance(one, StorageError) for one in causes):
        return StorageError(words)
    failed = any(isinstance(one, torch.AcceleratorError) for one in causes)
    return DeviceError(f"{words}. The device has failed; start a new process") if failed else OffmateError(words)


def out_of_memory(device: torch.device, budget_bytes: int, plan: Plan | None) -> str:
    """Describe the device's memory as the plan predicts it and as the device reports it."""
    free, total = torch.accelerator.get_memory_info(device)
    planned = "" if plan is None else f"; planned {format_bytes(plan.predicted_peak_bytes)}"
    return (
        f"{device} ran out of memory: budget {format_bytes(budget_bytes)}{planned}; in fact, at most "
        f"{format_bytes(torch.accelerator.max_memory_allocated(device))} allocated and "
        f"{format_bytes(torch.accelerator.max_memory_reserved(device))} reserved, with {format_bytes(free)} of "
        f"{format_bytes(total)} free on the device. The budget includes what your own code keeps on the device: free "
        "it, or raise gpu_budget"
    )


def _readable(truth: Truth) -> str:
    if truth.lost:
        return f"The values in RAM can be read, but {truth.torn_words()}"
    if truth.torn:
        return f"Each parameter can be read, with an optimizer state of the same update; {truth.torn_words()}"
    return "All parameters and optimizer states can be read, and are those of one update"
