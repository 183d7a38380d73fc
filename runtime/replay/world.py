"""What everything that replays a schedule shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...solver.items import Item
from ...solver.schedule import Schedule
from ..devices.device import Device
from ..ledger import Ledger
from ..memory.updated import Updated
from .binding import Binding, HostState, Update
from .contents import Contents


@dataclass(frozen=True)
class World:
    """A schedule, the tensors that it is replayed on, and where.

    Parameters
    ----------
    schedule, binding: what to do, and on which tensors.
    host: parameters, buffers and optimizer states.
    device: where; its ledger counts every byte.
    update: the optimizer's update of one tensor; None if the user's code updates.
    updated: what the optimizer holds of parameters that are updated on an accelerator.
    contents: what is on the device and under way.
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
        """The ledgers of tiers beside device and host by name, each with its capacity as the limit."""
        return {tier.name: Ledger(tier.capacity_bytes) for tier in self.schedule.rates.tiers}

    def tier_of(self, item: Item) -> str:
        """The tier that an item leaves to."""
        return self.schedule.path_of(item).tier
