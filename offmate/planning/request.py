"""The request for a plan, and the result of planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from ..capture.arrivals import Arrivals
from ..capture.captured import Captured
from ..capture.chain import Cut
from ..capture.spec import LowPrecision
from ..config import Config
from ..lowering.frozen_files import FrozenFiles
from ..lowering.state_files import StateFiles
from ..plans.plan import Plan
from ..runtime.replay.binding import Binding
from ..solver.steps import InPasses, passes_and_slots


@dataclass(frozen=True)
class Request(InPasses):
    """The requirements of a plan, besides the model and the batch.

    Parameters
    ----------
    budget_bytes, host_budget_bytes: budgets of device and host.
    device: kind of device. user_bytes: bytes reserved for the user's code; None estimates them, as `user_factor` times
        what usual losses hold.
    automatic: the device's budget is what is free now, and a smaller one serves if less remains.
    automatic_host: the host budget is what is available now; a stored plan only has to fit into it.
    micro_batches, per_step, last_per_step: how an update runs in passes. clips: whether gradients are clipped.
    measures: whether the norm of all gradients is measured, without anything waiting for it.
    scales: whether losses are scaled, so that an update may be skipped.
    margin_bytes: the part of the budget that is left to the device's allocator.
    spare_bytes: the part of the budget that is left to batches of other shapes, whose kernels may hold more although
        they are smaller.
    files: frozen parameters that may come from files where the host budget is short of room; None if there are none.
    storage: files that optimizer states and activations may leave to; None if no storage paths were named.
    """

    budget_bytes: int
    host_budget_bytes: int
    device: str
    config: Config
    user_bytes: int | None = None
    user_factor: float = 1.0
    automatic: bool = False
    automatic_host: bool = False
    micro_batches: int = 1
    per_step: int = 1
    last_per_step: int = 0
    clips: bool = False
    measures: bool = False
    scales: bool = False
    margin_bytes: int = 0
    spare_bytes: int = 0
    files: FrozenFiles | None = None
    storage: StateFiles | None = None

    @property
    def gate(self) -> bool:
        """Return whether updates wait until all gradients are complete."""
        return self.clips or self.scales or self.adds_up

    @property
    def by_block(self) -> Request:
        """The request of plans that run each block for several micro-batches in turn: the named number, or all."""
        return self.in_passes(self.config.micro_batches_per_pass or self.per_update)

    def in_passes(self, per_pass: int) -> Request:
        """Return the request of plans that run so many micro-batches of an update per pass, the last what is left."""
        passes, slots, last = passes_and_slots(self.per_update, per_pass)
        return replace(self, micro_batches=passes, per_step=slots, last_per_step=last)

    @property
    def speculates(self) -> bool:
        """Return whether the host may update before all gradients are complete, with a log that undoes it."""
        return self.gate and self.config.speculate is True

    @property
    def chooses(self) -> bool:
        """Return whether two plans are made, of which only one lets the host update before the gate."""
        return self.gate and self.config.speculate == "auto"

    def speculating(self, early: bool) -> Request:
        """Return the request of one of these two plans."""
        return replace(self, config=replace(self.config, speculate=early and self.gate))

    def has_room_for(self, size_bytes: int) -> bool:
        """Return whether the host's budget is that large."""
        return size_bytes <= self.host_budget_bytes


@dataclass(frozen=True)
class Prepared:
    """A captured model with its plan, ready to be replayed.

    Parameters
    ----------
    gradient_like: per output that receives a gradient from the user, a meta tensor laid out like that gradient.
    arrivals: of the gradients in plain PyTorch. keys: class of every block. cut: how the graph was cut into them.
    structure: that of the traced model without sizes; "" if no other plan may reuse the decisions. low: parameters that
        move in a lower precision.
    """

    captured: Captured
    plan: Plan
    binding: Binding
    gradient_like: dict[str, torch.Tensor]
    arrivals: Arrivals = field(default_factory=Arrivals)
    keys: tuple[str, ...] = ()
    cut: Cut = ()
    structure: str = ""
    low: Mapping[str, LowPrecision] = field(default_factory=dict)
