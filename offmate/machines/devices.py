"""The devices that a user can name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import DeviceError, UnknownDevice
from ..runtime.devices.device import Device
from ..runtime.devices.emulated import EmulatedDevice
from ..runtime.devices.streams import StreamDevice
from ..sizes import format_bytes
from .host_memory import default_host_budget_bytes, is_wsl
from .warm_up import warm_up

log = logging.getLogger("offmate")

EMULATED = "emulated"
_LEAST_MARGIN_BYTES = 1 << 28
_LEAST_WSL_MARGIN_BYTES = 1 << 30  # Windows draws with the same memory, and lends more of it than there is


def device_kind(device: str | torch.device | None) -> str:
    """Resolve the device that a user names: "emulated", or a torch accelerator with its index, such as "cuda:0".

    Parameters
    ----------
    device: None takes an accelerator if there is one.

    Raises: UnknownDevice if this machine has no such device.
    """
    available = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        name = EMULATED if available is None else f"{available.type}:{torch.accelerator.current_device_index()}"
        log.info("device: %s", f"{name} (the CPU emulates the device)" if available is None else name)
        return name
    name = str(device)
    if name == EMULATED:
        return name
    try:
        asked = torch.device(name)
    except RuntimeError:
        raise UnknownDevice(f"device={name!r} is not known; use 'cuda', 'cuda:1' or 'emulated'") from None
    if available is None or asked.type != available.type:
        found = "no accelerator" if available is None else f"only {available.type!r}"
        raise UnknownDevice(
            f"device={name!r}: torch {torch.__version__} sees {found} here; use device='emulated', which runs anywhere"
            + (", or install a torch build with CUDA" if asked.type == "cuda" else "")
        )
    index = torch.accelerator.current_device_index() if asked.index is None else asked.index
    if index >= torch.accelerator.device_count():
        raise UnknownDevice(
            f"device={name!r} does not exist; the last device here has number {torch.accelerator.device_count() - 1}"
        )
    return f"{asked.type}:{index}"


def default_budget_bytes(kind: str) -> int:
    """Return the budget that "auto" stands for: memory that is free or held by this process, less a margin.

    On a card, kernels and libraries are loaded first. The emulated device takes half of the host's budget.
    """
    where = accelerator(kind)
    if where is None:
        return default_host_budget_bytes() // 2
    warm_up(where)
    free, total = torch.accelerator.get_memory_info(where)
    margin = max(total // 50, _LEAST_WSL_MARGIN_BYTES if is_wsl() else _LEAST_MARGIN_BYTES)
    return max(0, free + torch.accelerator.memory_reserved(where) - margin)


def still_free_bytes(kind: str, budget_bytes: int) -> int:
    """Return the budget that "auto" stands for now, if it was this one and no longer fits; else this one."""
    where = accelerator(kind)
    if where is None:
        return budget_bytes
    free, _ = torch.accelerator.get_memory_info(where)
    if budget_bytes <= free + torch.accelerator.memory_reserved(where):
        return budget_bytes
    return min(budget_bytes, default_budget_bytes(kind))


def check_budget(kind: str, budget_bytes: int) -> None:
    """Raise DeviceError if a device does not have that much memory."""
    where = accelerator(kind)
    if where is None:
        return
    free, total = torch.accelerator.get_memory_info(where)
    held = torch.accelerator.memory_reserved(where)
    if budget_bytes > total:
        raise DeviceError(
            f"gpu_budget is {format_bytes(budget_bytes)}, but {words(where)} has {format_bytes(total)}; give less, or "
            'leave gpu_budget out ("auto")'
        )
    if budget_bytes <= 0:
        raise DeviceError(
            f"no memory of {words(where)} is left for a plan: other processes hold {format_bytes(total - free - held)} "
            f"of {format_bytes(total)}, including contexts. End them, or wait"
        )
    if budget_bytes > free + held:
        raise DeviceError(
            f"gpu_budget is {format_bytes(budget_bytes)}, but only {format_bytes(free + held)} of {words(where)} are "
            f"free: other processes hold {format_bytes(total - free - held)}, including contexts. End them, or lower "
            "gpu_budget"
        )


def accelerator(kind: str) -> torch.device | None:
    """Return the torch device of a kind from `device_kind`; None if the CPU emulates it."""
    return None if kind == EMULATED else torch.device(kind)


def make_device(kind: str, limit_bytes: int) -> Device:
    """Make a device of a kind, with a budget."""
    where = accelerator(kind)
    return EmulatedDevice(limit_bytes) if where is None else StreamDevice(where, limit_bytes)


def words(device: torch.device) -> str:
    """Return the device's name as its maker gives it."""
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)


@contextlib.contextmanager
def rng_untouched(device: torch.device | None) -> Iterator[None]:
    """Restore the generators of the host and the device after the body has drawn random numbers."""
    if device is None:
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device.index], device_type=device.type):
            yield
