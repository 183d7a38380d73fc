"""What a caching allocator reserves for a schedule, found out on the allocator itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .rehearsal import SMALL_SEGMENT_BYTES, Change, pool_peaks

# Left for the user's own tensors (batches, losses, metrics), which come and go as they like.
_SLACK_SEGMENTS, _SLACK_SHARE = 2, 256
# By which the segment is larger than it must be, since tensors may die in another order than rehearsed: this part of it
# at least if that can be, and more where there is room.
_LEAST_PAD_SHARE, _PAD_SHARE, _PAD_BYTES = 32, 16, 24 << 20
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
    device: torch.device, starts: tuple[list[Change], ...], budget_bytes: int, least_bytes: int = 0
) -> Reserved | Shortfall:
    """Have the allocator reserve what an iteration takes, most of it in one piece.

    One large segment, from which the allocator cuts and into which it merges, leaves less unused than many small ones.
    Nothing of the iteration may be on the device.

    Parameters
    ----------
    starts: allocations in order, as `rehearse` gives them, for every way in which training may start.
    budget_bytes: what may be reserved, library workspaces included. least_bytes: of the segment, since other iterations
        need that much.

    Returns: what was reserved, or what is missing for the iteration to fit.
    """
    _make_workspaces(device)
    large, small = (max(peaks) for peaks in zip(*(pool_peaks(changes) for changes in starts)))
    torch.accelerator.empty_cache()
    slack = _SLACK_SEGMENTS * SMALL_SEGMENT_BYTES + budget_bytes // _SLACK_SHARE
    limit = budget_bytes - slack
    whole = limit - torch.accelerator.memory_reserved(device) - small
    # Small allocations may need a segment more, where they do not fill theirs.
    fitting = whole - whole // (_LEAST_PAD_SHARE + 1)
    wholes = {fitting, fitting - SMALL_SEGMENT_BYTES}
    tried = {min(max(least_bytes, large * part // 100), most) for part in _SEGMENT_PERCENT for most in wholes} | wholes
    exact = None
    for segment in sorted(tried):
        if not segment >= min(large, fitting) >= 0 or not _fits(device, starts, segment, limit):
            continue
        room = limit - torch.accelerator.max_memory_reserved(device)
        padded = segment + (min(room, segment // _PAD_SHARE + _PAD_BYTES) if large else 0)
        padded -= padded % SMALL_SEGMENT_BYTES  # segments are whole multiples
        wide = padded >= min(large, segment) + segment // _LEAST_PAD_SHARE
        if wide and _fits(device, starts, padded, limit):
            return Reserved(torch.accelerator.memory_reserved(device) + slack, padded)
        exact = segment if exact is None else exact
    # A larger segment may be cut up so that less fits: then one that is known to do has to.
    if exact is not None and _fits(device, starts, exact, limit):
        return Reserved(torch.accelerator.memory_reserved(device) + slack, exact)
    return Shortfall(max(0, large + large // _LEAST_PAD_SHARE - whole))


def _make_workspaces(device: torch.device) -> None:
    """Let matrix libraries take what they hold for good: once for this thread, and once for autograd's."""
    with torch.enable_grad():
        a, b = (torch.ones(16, 16, device=device, requires_grad=True) for _ in range(2))
        torch.nn.functional.linear(a, b, torch.ones(16, device=device)).matmul(b).sum().backward()


def _fits(device: torch.device, starts: tuple[list[Change], ...], segment_bytes: int, limit_bytes: int) -> bool:
    """Whether every start stays within the limit; the allocator then keeps what the last one took."""
    most = [_replay(device, changes, segment_bytes) for changes in starts]
    return all(reserved is not None and reserved <= limit_bytes for reserved in most)


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
