"""The objects that everything that replays a schedule shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...solver.items import Item
from ...solver.resources import Path
from ...solver.schedule import Schedule
from ..devices.device import Device
from ..ledger import Ledger
from ..memory.updated import Updated
from .binding import Binding, HostState, Update
from .contents import Contents
from .shapes import Shape, Shapes
from .shared_host import SharedHost


@dataclass(frozen=True)
class World:
    """A schedule, the tensors that it is replayed on, and the device.

    Parameters
    ----------
    schedule, binding: the actions, and their tensors, for the largest batches that they serve.
    host: parameters, buffers and optimizer states.
    device: the device; its ledger counts every byte.
    update: the optimizer's update of one tensor; None if the user's code updates.
    updated: the optimizer's memory for parameters that are updated on an accelerator.
    contents: the items on the device and the copies under way.
    """

    schedule: Schedule
    binding: Binding
    host: HostState
    device: Device
    update: Update | None = None
    updated: Mapping[str, Updated] = field(default_factory=dict)
    contents: Contents = field(default_factory=Contents)

    @cached_property
    def tiers(self) -> dict[str, Ledger]:
        """The ledgers, by name, of tiers besides device and host, each with its capacity as the limit."""
        return {tier.name: Ledger(tier.capacity_bytes) for tier in self.schedule.rates.tiers}

    @cached_property
    def shapes(self) -> Shapes:
        """The shapes of the micro-batches of the pass that runs."""
        return Shapes(Shape(self.schedule, self.binding))

    @cached_property
    def shared_host(self) -> SharedHost:
        """The host memory that items share."""
        return SharedHost(self.schedule, self.device)

    @cached_property
    def store_path(self) -> Path | None:
        """The path between the device and the files that states and parameters are kept in; None without any."""
        return next((tier.path for tier in self.schedule.rates.tiers if tier.for_states), None)

    def tier_of(self, item: Item) -> str:
        """Return the tier that an item leaves to."""
        return self.schedule.path_of(item).tier
