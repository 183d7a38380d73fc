"""The objects that everything that replays a schedule shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ...solver.items import Item
from ...solver.schedule import Schedule
from ..devices.device import Device
from ..ledger import Ledger
from ..memory.updated import Updated
from .binding import Binding, HostState, Update
from .contents import Contents


@dataclass(frozen=True)
class World:
    """A schedule, the tensors that it is replayed on, and the device.

    Parameters
    ----------
    schedule, binding: the actions, and their tensors.
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

    def home_of(self, name: str) -> torch.Tensor:
        """Return the host memory of a parameter as it comes to the device."""
        return self.host.casts[name] if name in self.binding.casts else self.host.params[name]

    def renew_casts(self) -> None:
        """Cast the parameters that come to the device cast and have changed since; none may be on the device."""
        host = self.host
        for name, dtype in self.binding.casts.items():
            known = host.casts.get(name)
            if known is None or known.dtype != dtype or name in host.outdated:
                param = host.params[name]
                if known is None or (known.dtype, known.shape, known.stride()) != (dtype, param.shape, param.stride()):
                    known = self.device.empty_host_like(torch.empty_like(param, dtype=dtype, device="meta"))
                host.casts[name] = known.copy_(param)
                host.outdated.discard(name)

    def tier_of(self, item: Item) -> str:
        """Return the tier that an item leaves to."""
        return self.schedule.path_of(item).tier
