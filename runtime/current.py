"""The device and the stream that torch takes where none is named: the calling thread's, not those of a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def stream_on(device: torch.device, stream: torch.Stream | None = None) -> torch.Stream:
    """Return a stream if there is one, else the device's current stream.

    Events that are given no stream take that of the current device, which may be another one.
    """
    return stream if stream is not None else torch.accelerator.current_stream(device)


def entered(device: torch.device | None) -> contextlib.AbstractContextManager[None]:
    """Make an accelerator the calling thread's current device inside; do nothing for the CPU and for None.

    Kernels that are launched without a device guard, such as Triton's, run on the current device.
    """
    if device is None or device.type == "cpu":
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


@contextlib.contextmanager
def entered_on(device: torch.device, stream: torch.Stream | None) -> Iterator[None]:
    """Make a device and one of its streams current inside; None leaves the device's stream as it is."""
    with entered(device):
        before = None if stream is None else stream_on(device)
        if stream is None or before is None or stream == before:
            yield
            return
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
