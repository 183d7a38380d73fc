"""What copies take where the system pins less host memory than a model has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch

from ..runtime.devices.streams import StreamDevice
from .host_memory import is_wsl
from .links import LinkRates, measure_link

_PROBE_BYTES = 1 << 26  # of each block that is pinned to find out how much can be
_UNLIMITED_BYTES = 2**62


def as_pinned(rates: LinkRates, params: Iterable[torch.Tensor], others_bytes: int, where: torch.device) -> LinkRates:
    """Return the mean rates of a model's copies, of which some go through staging buffers if pinning has a limit.

    A limit shows in parameters that could not be pinned. Under WSL, where there always is one, what can be pinned
    beyond them is tried.

    Parameters
    ----------
    rates: of pinned memory. params: the parameters on the host, pinned as far as possible if they will train.
    others_bytes: bytes of gradients and optimizer states, which may need pinned memory, too. where: the card.
    """
    known = list(params)
    owners = Counter(param.untyped_storage().data_ptr() for param in known)
    own = [param for param in known if owners[param.untyped_storage().data_ptr()] == 1 and param.nbytes]
    pinned = sum(param.nbytes for param in own if param.is_pinned())
    wanted = sum(param.nbytes for param in own) + others_bytes
    unpinned = sum(param.nbytes for param in own) - pinned
    if is_wsl():
        pinned += _pinnable_bytes(wanted - pinned)
    elif not pinned or not unpinned:
        return rates
    share = min(1.0, pinned / wanted) if wanted else 1.0
    return rates if share == 1.0 else _mean(rates, _staged(where), share)


def _staged(where: torch.device) -> LinkRates:
    device = StreamDevice(where, _UNLIMITED_BYTES)
    device.host_memory.stop()
    try:
        return measure_link(device)
    finally:
        device.close()


def _mean(pinned: LinkRates, staged: LinkRates, share: float) -> LinkRates:
    """Return the rates at which bytes move of which this share is pinned."""

    def mean(one: float, other: float, rate: bool) -> float:
        if not rate:
            return share * one + (1 - share) * other
        return 1 / (share / one + (1 - share) / other)

    names = [one.name for one in fields(LinkRates) if one.name not in ("host_memory_bytes_per_s", "manage_s")]
    found: dict[str, Any] = {
        name: mean(getattr(pinned, name), getattr(staged, name), name.endswith("bytes_per_s")) for name in names
    }
    return replace(pinned, **found)


def _pinnable_bytes(wanted_bytes: int) -> int:
    """Return how much more can be pinned, up to this; 0 if torch could not let go of it again."""
    let_go = getattr(torch.accelerator, "empty_host_cache", None)
    if let_go is None:
        return 0
    held: list[torch.Tensor] = []
    size = _PROBE_BYTES
    while size >= 1 << 20 and sum(block.nbytes for block in held) < wanted_bytes:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        except RuntimeError:
            size //= 2
    found = sum(block.nbytes for block in held)
    held.clear()
    let_go()
    return found
