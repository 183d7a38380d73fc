"""Copies of parameters in the precision to which autocast casts them, which plans may move instead of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..optim.chunks import was_edited
from ..runtime.devices.device import Device
from ..runtime.replay.binding import HostState
from ..runtime.replay.low_copies import WHOLE


class LowCopies:
    """The parameters of which the host has a copy in a lower precision, for the plan that is on the device.

    Such a copy takes the parameter's place in `HostState.params`, and the parameter itself that of a part of its
    optimizer state: updates alone read it, and write both. The user sees the parameter.

    State: that of `host`; `_memory`, the copies' memory, kept for plans to come; `seen`, whether the user has read
    parameters, and may have written into them, since that was last looked for. Changed on the training thread.
    """

    def __init__(self, host: HostState) -> None:
        self._host = host
        self._memory: dict[str, torch.Tensor] = {}
        self.seen = False

    def move(self, name: str, own: torch.Tensor) -> None:
        """Give a parameter other memory, which has its values."""
        if name in self._host.low:
            self._host.states[name][WHOLE] = own
        else:
            self._host.params[name] = own

    def settle(self, precisions: Mapping[str, torch.dtype], device: Device) -> None:
        """Have copies of these parameters, with their present values, and no others; nothing may be under way."""
        host = self._host
        for name in sorted(host.low - precisions.keys()):
            host.low.discard(name)
            host.params[name] = self._taken_out(name)
        for name, dtype in precisions.items():
            own = host.whole(name)
            kept = self._memory.get(name)
            if kept is None or (kept.dtype, kept.shape, kept.stride()) != (dtype, own.shape, own.stride()):
                like = torch.empty_strided(own.shape, own.stride(), dtype=dtype, device="meta")
                self._memory[name] = device.empty_host_like(like)
            if name not in host.low:
                others = dict(host.states.get(name, {}))
                host.states[name] = {WHOLE: own, **others}
                host.params[name] = self._memory[name]
                host.low.add(name)
        self.seen = False
        with torch.no_grad():
            for name in host.low:
                host.params[name].copy_(host.whole(name))

    def differ(self) -> bool:
        """Return whether parameters were written into in a way that no version reveals, as by numpy.

        Only values that the user has read can have been; the host must hold the newest ones.
        """
        seen, self.seen = self.seen, False
        return seen and any(was_edited(self._host.params[name], self._host.whole(name)) for name in self._host.low)

    def forget(self) -> None:
        """Have no copies any more, since parameters are to be adopted anew."""
        for name in sorted(self._host.low):
            self._taken_out(name)
        self._host.low.clear()
        self._memory.clear()

    def _taken_out(self, name: str) -> torch.Tensor:
        own = self._host.states[name].pop(WHOLE)
        assert isinstance(own, torch.Tensor)
        if not self._host.states[name]:
            del self._host.states[name]
        return own
