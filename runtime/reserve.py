"""What a caching allocator reserves for a schedule, found out on the allocator itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .rehearsal import SMALL_SEGMENT_BYTES, Change, pool_peaks

# Left for the user's own tensors (batches, losses, metrics), which come and go as they like.
_SLACK_SEGMENTS, _SLACK_SHARE = 2, 256
_SEGMENT_PERCENT = (102, 105, 110)  # of the large allocations' peak: sizes tried for the one segment


@dataclass(frozen=True)
class Reserved:
    """Bytes that the allocator will hold in all, what is left for the user's included, and those of the one segment."""

    bytes: int
    segment_bytes: int


@dataclass(frozen=True)
class Shortfall:
    """Bytes by which the budget is too small even without gaps; 0 if only gaps are in the way."""

    bytes: int


def reserve(
    device: torch.device, changes: list[Change], budget_bytes: int, least_bytes: int = 0
) -> Reserved | Shortfall:
    """Have the allocator reserve what an iteration takes, most of it in one piece.

    One large segment, from which the allocator cuts and into which it merges, leaves less unused than many small ones.
    Nothing of the iteration may be on the device.

    Parameters
    ----------
    changes: allocations in order, as `rehearse` gives them.
    budget_bytes: what may be reserved, library workspaces included. least_bytes: of the segment, since other iterations
        need that much.

    Returns: what was reserved, or what is missing for the iteration to fit.
    """
    large, small = pool_peaks(changes)
    torch.accelerator.empty_cache()
    slack = _SLACK_SEGMENTS * SMALL_SEGMENT_BYTES + budget_bytes // _SLACK_SHARE
    limit = budget_bytes - slack
    whole = limit - torch.accelerator.memory_reserved(device) - small
    # Small allocations may need a segment more, where they do not fill theirs.
    wholes = {whole, whole - SMALL_SEGMENT_BYTES}
    tried = {min(max(least_bytes, large * part // 100), most) for part in _SEGMENT_PERCENT for most in wholes} | wholes
    for segment in sorted(tried):
        reserved = _replay(device, changes, segment) if segment >= min(large, whole) >= 0 else None
        if reserved is not None and reserved <= limit:
            return Reserved(reserved + slack, segment)
    return Shortfall(max(0, large - whole))


def _replay(device: torch.device, changes: list[Change], segment_bytes: int) -> int | None:
    """The most bytes reserved while the changes are made after a first one of `segment_bytes`; None if they fail."""
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    live: dict[int, torch.Tensor] = {}
    try:
        torch.empty(segment_bytes, dtype=torch.uint8, device=device)  # let go at once, and kept by the allocator
        for change in changes:
            if change.bytes:
                live[change.number] = torch.empty(change.bytes, dtype=torch.uint8, device=device)
            else:
                del live[change.number]
    except torch.OutOfMemoryError:
        return None
    return torch.accelerator.max_memory_reserved(device)
