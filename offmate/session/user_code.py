"""The bytes that the user's code holds on the device between forward and backward(), measured once per kind of call."""

from __future__ import annotations

import logging
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..machines.allocations import AllocationLog, DeviceAllocationLog, allocation_log, profiler_is_taken
from ..sizes import format_bytes
from .variants import CallKind, Variant

log = logging.getLogger("offmate")

_BACKWARD = "backward"


class UserCode:
    """Measures the memory of the user's code.

    State: `held_bytes` by kind of call; `factor`, their ratio to the bytes of usual losses; the log under way, and the
    variant of the call after which it began.

    Parameters
    ----------
    device: where operators run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.held_bytes: dict[CallKind, int] = {}
        self.factor = 1.0
        self._log: AllocationLog | DeviceAllocationLog | None = None
        self._hook: RemovableHandle | None = None
        self._after: Variant | None = None

    def begins(self, variant: Variant) -> None:
        """Start to watch as the model returns, if the loss is computed outside of it and this kind was not seen yet."""
        computes = any(like.numel() > 1 for like in variant.prepared.gradient_like.values())
        if computes and _either(variant.kind) not in self.held_bytes and not profiler_is_taken():
            self._log, self._after = allocation_log(self._device).__enter__(), variant
            # The log ends with this object at the latest.
            end = self._end = weakref.finalize(self, self._log.__exit__, None, None, None)
            # A loop that updates by itself calls nothing of offmate after backward(), so its optimizer's step ends the
            # log; the loop may then use the profiler itself.
            self._hook = None if variant.updates else register_optimizer_step_pre_hook(lambda *_: end())

    def ends(self) -> None:
        """Mark the beginning of backward()."""
        if self._log is not None:
            # The profiler's state is restored when autograd returns, so it can only be marked here, not stopped.
            self._log.stretch(_BACKWARD, lambda: None)

    def stops(self) -> None:
        """Stop watching, since another forward comes before backward()."""
        if self._log is not None:
            self.ends()
            self._stop()

    def _stop(self) -> None:
        assert self._log is not None
        if self._hook is not None:
            self._hook.remove()
        if self._log.can_end:
            self._end()
        else:  # The next log of its thread, or the end of the process, ends it.
            self._log.cut_short = True

    def held_by(self, kind: CallKind) -> int | None:
        """Return the bytes that it holds with calls of a kind; None if that was not measured."""
        return self.held_bytes.get(_either(kind))

    def forget(self) -> None:
        """Discard what was measured, since the forward is given up."""
        if self._log is not None:
            self._stop()
            self._log = self._after = None

    def account(self) -> Variant | None:
        """Store what was measured; return the variant that reserves less, and so must be planned anew, if any does."""
        variant = self._after
        if self._log is None or variant is None or not self._log.is_here:
            return None
        self._stop()
        seen, self._log, self._after = self._log, None, None
        if seen.cut_short:
            return None
        measured = seen.peak_bytes(until=_BACKWARD)
        reserved = variant.prepared.plan.user_bytes
        self.held_bytes[_either(variant.kind)] = max(measured, reserved)
        log.info("your code holds %s between forward and backward", format_bytes(measured))
        if measured <= reserved:
            return None
        log.info(
            "that is more than the %s reserved, so the next iteration is planned again if the plan has no room for it",
            format_bytes(reserved),
        )
        self.factor *= measured / max(reserved, 1)
        return variant


def _either(kind: CallKind) -> CallKind:
    """Return a kind without what says when updates come, of which the user's code knows nothing."""
    return kind._replace(early=False)
