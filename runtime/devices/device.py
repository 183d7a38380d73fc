"""What a device must offer so that the executor can replay a schedule on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from ...solver.resources import Resource
from ..events import Event
from ..ledger import Ledger
from ..trace import Recorder

if TYPE_CHECKING:
    from ..memory.arena import Arena


class Device(Protocol):
    """A compute device with memory of its own, and a copy engine for every link.

    `ledger` counts its bytes. Copies and updates start after the events they are given, copies also after what was
    launched before them, and run beside what is launched later; of those of one direction, or of the host's, that are
    ready the first given goes first: one that has to wait holds up no other. A `recorder`, if there is one, is told of
    every copy and update. `torch_device` is where operators run; on the CPU the device's memory is the host's own, and
    there is no `arena`.
    """

    ledger: Ledger
    recorder: Recorder | None
    torch_device: torch.device

    @property
    def arena(self) -> Arena | None:
        """Where its large tensors find place."""
        ...

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        """Device memory for a tensor of this shape, strides and dtype."""
        ...

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device of a tensor of the user's, on any device; in order with what computes."""
        ...

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        """A host tensor, or a copy of it, such that copies from and to it run beside compute."""
        ...

    def empty_host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory from which and to which copies run beside compute."""
        ...

    def empty_on(self, tier: str, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of a tier other than the device; raises ValueError, naming the tier, if the device has none such."""
        ...

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: tuple[Event, ...], link: Resource = Resource.IN
    ) -> Event:
        """Start a copy to the device over a link, the host's unless another is named."""
        ...

    def copy_out(
        self, target: torch.Tensor, source: torch.Tensor, after: tuple[Event, ...], link: Resource = Resource.OUT
    ) -> Event:
        """Start a copy from the device over a link, the host's unless another is named."""
        ...

    def update_on_host(
        self, work: Callable[[], None], after: tuple[Event, ...], worker: Resource = Resource.CPU
    ) -> Event:
        """Start an optimizer update on a worker thread of the host."""
        ...

    def drain(self) -> None:
        """Wait for everything under way, failed or not."""
        ...

    def close(self) -> None:
        """Stop the device's threads."""
        ...
