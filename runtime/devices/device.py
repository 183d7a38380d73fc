"""The interface that a device offers so that the executor can replay a schedule on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from ...solver.resources import Resource
from ..events import Event
from ..ledger import Ledger
from ..storage.file_bytes import BytesInFile, WritableBytes
from ..trace import Recorder

if TYPE_CHECKING:
    from ..memory.arena import Arena


class Device(Protocol):
    """A compute device with its own memory, and a copy engine for every link.

    `ledger` counts its bytes. Copies and updates start after the events that they are given, copies also after all work
    launched before them, and they run concurrently with work launched later. Of the ready ones of one link or worker
    the first given goes first; a copy that has to wait delays no other. A `recorder`, if there is one, notes every copy
    and update. The host's workers compute with `update_threads` threads each. `torch_device` is where operators run; on
    the CPU the device's memory is the host's own, and there is no `arena`. `changed` is notified of everything that
    ends on a thread; whatever a copy may wait for on another thread has to notify it, too.
    """

    ledger: Ledger
    recorder: Recorder | None
    update_threads: int
    torch_device: torch.device
    changed: threading.Condition

    @property
    def arena(self) -> Arena | None:
        """The arena that makes room for its large tensors, if it has one."""
        ...

    def limit(self, limit_bytes: int) -> None:
        """Keep to another budget from now on; nothing may be on the device."""
        ...

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        """Return device memory for a tensor of this shape, strides and dtype."""
        ...

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a device copy of a tensor of the user's, from any device, in order with the computing stream."""
        ...

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        """Return a host tensor, or a copy of it, such that copies from and to it run concurrently with compute."""
        ...

    def empty_host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory such that copies from and to it run concurrently with compute."""
        ...

    def empty_on(self, tier: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory of a tier other than the device; raises ValueError, naming the tier, if it does not exist."""
        ...

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: tuple[Event, ...], link: Resource = Resource.IN
    ) -> Event:
        """Start a copy to the device over a link, by default the host's."""
        ...

    @property
    def file_buffers_bytes(self) -> int:
        """The bytes of host memory that files pass on their way, to the device and, once one is written, from it."""
        ...

    def read_in(
        self, target: torch.Tensor, source: BytesInFile, link: Resource, after: tuple[Event, ...] = ()
    ) -> Event:
        """Start to read a dense tensor's bytes from a file to the device, over a link and then the host's.

        Parameters
        ----------
        target: device memory in the layout of the file. after: events before the first read, such as the write of what
            is read; a read that waits for them delays no other.
        """
        ...

    def write_out(
        self, target: WritableBytes, source: torch.Tensor, after: tuple[Event, ...], link: Resource
    ) -> tuple[Event, Event]:
        """Start to write a dense tensor's bytes from the device to a file, over the host's link and then another one.

        Parameters
        ----------
        source: device memory in the layout of the file. after: events before the copies over the host's link, reads of
            what the file had before among them.

        Returns: the event of all bytes having left the device, after which its memory may be overwritten or freed, and
        that of all bytes being in the file, from which also a failed write raises. They are one event where the
        device's memory is the host's.
        """
        ...

    def transfer(self, start: Callable[[], Event], size: int, link: Resource, after: tuple[Event, ...]) -> Event:
        """Have files read to the host's memory, or written from there, over a link and not over the host's.

        Parameters
        ----------
        start: submits the transfer, on a thread. size: its bytes. after: events before it.
        """
        ...

    def copy_out(
        self, target: torch.Tensor, source: torch.Tensor, after: tuple[Event, ...], link: Resource = Resource.OUT
    ) -> Event:
        """Start a copy from the device over a link, by default the host's."""
        ...

    def update_on_host(
        self, work: Callable[[], None], after: tuple[Event, ...], worker: Resource = Resource.CPU
    ) -> Event:
        """Start an optimizer update on a worker thread of the host."""
        ...

    def drain(self) -> None:
        """Wait for everything under way, writes to files included, failed or not."""
        ...

    def close(self) -> None:
        """Stop the device's threads."""
        ...
