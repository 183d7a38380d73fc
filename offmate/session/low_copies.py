"""Copies of parameters in the precision to which autocast casts them, which plans may move instead of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from ..capture.spec import LowPrecision
from ..optim.chunks import was_edited
from ..runtime import interrupts
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

    def settle(self, precisions: Mapping[str, LowPrecision], device: Device) -> None:
        """Have the copies that a plan has, with their parameters' present values; nothing may be under way."""
        host, self.seen = self._host, False
        copied = {name: low.dtype for name, low in precisions.items() if low.copied}
        with interrupts.held(), torch.no_grad():
            for name in sorted(host.low - copied.keys()):
                self._lift(name)
            for name, dtype in copied.items():
                own = host.whole(name)
                kept = self._memory.get(name)
                if kept is None or (kept.dtype, kept.shape, kept.stride()) != (dtype, own.shape, own.stride()):
                    like = torch.empty_strided(own.shape, own.stride(), dtype=dtype, device="meta")
                    kept = self._memory[name] = device.empty_host_like(like)
                self._lower(name, own, kept)
                kept.copy_(own)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Have no copies in the body, which only reads parameters, and afterwards the same ones again."""
        copies = {name: self._host.params[name] for name in sorted(self._host.low)}
        for name in copies:
            self._lift(name)
        try:
            yield
        finally:
            for name, own in copies.items():
                self._lower(name, self._host.params[name], own)

    def _lower(self, name: str, own: torch.Tensor, low: torch.Tensor) -> None:
        others = {key: value for key, value in self._host.states.get(name, {}).items() if key != WHOLE}
        self._host.states[name] = {WHOLE: own, **others}
        self._host.low.add(name)
        self._host.params[name] = low

    def _lift(self, name: str) -> None:
        own = self._host.whole(name)
        self._host.params[name] = own
        self._host.low.discard(name)
        del self._host.states[name][WHOLE]
        if not self._host.states[name]:
            del self._host.states[name]

    def differ(self) -> bool:
        """Return whether parameters were written into in a way that no version reveals, as by numpy.

        Only values that the user has read can have been; the host must hold the newest ones.
        """
        seen, self.seen = self.seen, False
        return seen and any(was_edited(self._host.params[name], self._host.whole(name)) for name in self._host.low)

    def forget(self) -> None:
        """Have no copies any more, and no memory for them, since parameters are to be adopted anew."""
        for name in sorted(self._host.low):
            self._lift(name)
        self._memory.clear()
