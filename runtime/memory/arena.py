"""One large segment of an accelerator's memory, in which tensors are moved to make room for one that does not fit."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import torch

from ..events import Event
from ..torch_names.tensors import StorageWeakRef, has_expired, storage_behind
from .compaction import LEAST_CUT_BYTES, Extent, Stretch, cheapest_run, first_without_place, gaps_between, run_to_pack
from .pools import SMALL_SEGMENT_BYTES, large_sizes, rounded

_ROUNDS = 30  # most rounds of moves for one allocation
_STRAYS = 64  # most pieces of the same size elsewhere that are taken before the right one


@dataclass(eq=False)
class _Tensor:
    """The memory of a tensor, and the copies that read or write it.

    `end`: the end of its piece. Unless it is `sure`, the piece may be longer, by the most that an allocator does not
    cut off. `fixed`: whether other code may use its address.
    """

    start: int
    end: int
    bytes: int
    storage: StorageWeakRef
    sure: bool
    fixed: bool = False
    copies: list[Event] = field(default_factory=list)


class Arena:
    """Makes room for large tensors in one segment of the allocator's memory.

    The allocator alone decides where a tensor lies: best fit, the smallest gap that is large enough. If no gap is, some
    tensors move to smaller ones, by copies on the computing stream, until one is. Work launched before a move reads the
    old memory, work launched later the new one. Copies on other streams are waited for on that stream, and a tensor
    with a copy yet to be launched does not move (see `runtime/replay/contents.py`).

    Changed on the executor's thread only. State: `start` and `_end` of the segment; `_tensors` by start, and in order
    their `_starts`, `_ends` (larger if not sure) and `_weak` pointers to their storages; `_foreign`, gaps that unknown
    memory occupies; `_sure_bytes`, which certainly lie in one gap; `_anchor`, a piece that keeps the segment from being
    returned; `moved_bytes` so far.

    Parameters
    ----------
    device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start = self._end = self._sure_bytes = self.moved_bytes = 0
        self._tensors: dict[int, _Tensor] = {}
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._weak: list[int] = []
        self._foreign: list[Extent] = []
        self._anchor: torch.Tensor | None = None

    def take(self, segment_bytes: int) -> None:
        """Have the allocator reserve the segment, and as little else as possible, before an iteration starts.

        If some of the user's tensors lie in an earlier segment and both do not fit, the earlier one stays in use.
        """
        self._anchor = None
        self.forget_gaps()
        torch.accelerator.empty_cache()
        if not segment_bytes:
            self.start = self._end = 0
            return
        with contextlib.suppress(torch.OutOfMemoryError):
            start = self._empty(segment_bytes).data_ptr()  # freed at once; the allocator keeps the segment
            for known in (self._tensors, self._starts, self._ends, self._weak):
                known.clear()
            self.start, self._end = start, start + segment_bytes
        self._anchor = self._piece_of_segment()

    def _piece_of_segment(self) -> torch.Tensor | None:
        """Allocate the smallest piece that large tensors get, in the segment; None if the segment has none.

        Gaps elsewhere (next to a library's workspace) come first, since they are smaller.
        """
        strays: list[torch.Tensor] = []
        with contextlib.suppress(torch.OutOfMemoryError):
            while self.start < self._end and len(strays) < _STRAYS:
                piece = self._empty(SMALL_SEGMENT_BYTES)
                if self.start <= piece.data_ptr() < self._end:
                    return piece
                strays.append(piece)
        return None

    def let_go(self) -> None:
        """Release the anchor once no tensor of an iteration is left, so that other code may take the segment."""
        self._anchor = None

    def room(self, sizes: Iterable[int]) -> None:
        """Make room for tensors of these bytes, which are allocated next and together."""
        wanted = large_sizes(sizes)
        if not wanted or self._anchor is None:
            return
        for _ in range(_ROUNDS):
            short = self._short(wanted)
            # To wait for a copy under way would delay the computing stream.
            run = short and (self._run(short, waits=False) or self._run(short, waits=True))
            if not run:
                break
            self._clear(run)
        if self._short(wanted) is not None and not self._have_place_elsewhere(wanted):
            self._pack(sum(wanted))  # if that does not help either, the allocator reports what it has
        self._sure_bytes = max(0, self._sure_bytes - sum(wanted))

    def _short(self, wanted: list[int]) -> int | None:
        """Return the first of some sizes that has no place; None if all have."""
        total = sum(wanted)
        if total <= self._sure_bytes:
            return None
        lengths = self._gap_lengths()
        short = first_without_place(lengths, wanted)
        if short is None:
            self._sure_bytes = max(lengths[-1], total)
        return short

    def _have_place_elsewhere(self, wanted: list[int]) -> bool:
        """Return whether the allocator has place for these sizes outside the segment, or may reserve it."""
        try:
            return bool([self._empty(size) for size in wanted])
        except torch.OutOfMemoryError:
            return False

    def note(self, tensor: torch.Tensor, *, alone: bool = False) -> None:
        """Register a tensor that has been allocated; one that is known already stays as it is.

        Parameters
        ----------
        alone: whether nothing else has been allocated or freed since.
        """
        storage = tensor.untyped_storage()
        start, weak = storage.data_ptr(), StorageWeakRef(storage)
        known = self._tensors.get(start)
        if self.start <= start < self._end and (known is None or known.storage.cdata != weak.cdata):
            self._lies(start, storage.nbytes(), weak, alone)

    def fix(self, tensor: torch.Tensor) -> None:
        """Mark a tensor as one whose address other code may use from now on."""
        self.note(tensor)
        known = self._tensors.get(tensor.untyped_storage().data_ptr())
        if known is not None:
            known.fixed = True

    def copied(self, tensor: torch.Tensor, event: Event) -> None:
        """Register a copy from or to a tensor that is under way."""
        known = self._tensors.get(tensor.untyped_storage().data_ptr())
        if known is not None:
            known.copies.append(event)

    def forget_gaps(self) -> None:
        """Forget the known gaps, since other code may have allocated."""
        self._sure_bytes = 0
        self._foreign.clear()

    def _lies(self, start: int, size: int, storage: StorageWeakRef, alone: bool) -> None:
        """Register a tensor at an address; a remainder too small to be cut off belongs to its piece."""
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start:
            self._forget(at)
        while at < len(self._starts) and has_expired(self._weak[at]):
            self._forget(at)
        end, edge = start + rounded(size), self._starts[at] if at < len(self._starts) else self._end
        near = edge - end <= LEAST_CUT_BYTES
        one = self._tensors[start] = _Tensor(start, edge if near else end, size, storage, alone or near)
        self._starts.insert(at, start)
        self._ends.insert(at, one.end if one.sure else one.end + LEAST_CUT_BYTES)
        self._weak.insert(at, storage.cdata)
        before = self._tensors[self._starts[at - 1]] if at else None
        if before is not None and before.end == start:
            before.sure, self._ends[at - 1] = True, start

    def _forget(self, at: int) -> _Tensor:
        del self._ends[at], self._weak[at]
        return self._tensors.pop(self._starts.pop(at))

    def _forget_dead(self) -> None:
        for at in reversed([at for at, pointer in enumerate(self._weak) if has_expired(pointer)]):
            self._forget(at)

    def _gap_lengths(self) -> list[int]:
        """Return the bytes of the gaps, ascending, as lower bounds if the end of a tensor is not sure."""
        assert self._anchor is not None
        self._forget_dead()
        if self._foreign or self._anchor.data_ptr() != self.start:
            gaps = gaps_between(self._extents(waits=True), self.start, self._end)
            return sorted(high - low for low, high in gaps)
        ends = chain((self.start + SMALL_SEGMENT_BYTES,), self._ends)
        edges = chain(self._starts, (self._end,))
        return sorted(edge - end for end, edge in zip(ends, edges) if edge - end > LEAST_CUT_BYTES)

    def _run(self, size: int, *, waits: bool) -> Stretch | None:
        return cheapest_run(self._extents(waits=waits), self.start, self._end, size)

    def _extents(self, *, waits: bool) -> list[Extent]:
        """List the extents in the segment, in order.

        Parameters
        ----------
        waits: whether tensors with copies under way may move, provided that these copies are launched.
        """
        assert self._anchor is not None
        self._forget_dead()
        anchor = self._anchor.data_ptr()
        found = [*self._foreign, Extent(anchor, anchor + SMALL_SEGMENT_BYTES, False, SMALL_SEGMENT_BYTES)]
        for start, end in zip(self._starts, self._ends):
            one = self._tensors[start]
            one.copies = [copy for copy in one.copies if not (copy.ready() and copy.done())]
            movable = all(copy.ready() for copy in one.copies) if waits else not one.copies
            found.append(Extent(start, min(end, self._end), movable and not one.fixed, rounded(one.bytes)))
        found.sort()
        edges = [*(one.start for one in found[1:]), self._end]
        return [one._replace(end=min(one.end, edge)) for one, edge in zip(found, edges)]

    # -- moves --------------------------------------------------------------------------------------------------------

    def _clear(self, run: Stretch) -> None:
        """Move everything out of a run, holding its free pieces meanwhile, so that nothing moves into them."""
        held = self._held_gaps(run)
        if held is None:
            return
        for extent in run.extents:
            one = self._forget(bisect_left(self._starts, extent.start))
            self._move(one)
            held.append(self._hold(one.start, rounded(one.bytes)))
            if held[-1] is None:
                return

    def _pack(self, size: int) -> None:
        """Lay the tensors of a run side by side, by way of host memory, so that `size` bytes are free behind them.

        Moves within the segment cannot do this where the only gaps are smaller than what lies between them.
        """
        run = self._run_to_pack(size)
        if run is None:
            for copy in [copy for one in self._tensors.values() for copy in one.copies]:
                copy.wait()  # now all copies are launched
            run = self._run_to_pack(size)
        held = run and self._held_gaps(run)
        if not run or held is None:
            return
        away = self._copied_to_host(run)
        if away is None:
            return
        for extent in run.extents:
            self._forget(bisect_left(self._starts, extent.start))
        # Nothing between these two loops, so that no other thread takes the memory meanwhile.
        held.clear()
        for _, storage, _ in away:
            storage.resize_(0)
        for one, storage, _ in away:
            storage.resize_(one.bytes)
            self._has_moved(one, storage)
        for _, storage, values in away:
            self._bytes_of(storage).copy_(values)

    def _copied_to_host(self, run: Stretch) -> list[tuple[_Tensor, torch.UntypedStorage, torch.Tensor]] | None:
        """Return the tensors of a run that are still in use, with their values; None if the host lacks the memory."""
        found = []
        for one in [self._tensors[extent.start] for extent in run.extents]:
            for copy in one.copies:
                copy.wait()
            storage = storage_behind(one.storage.cdata)
            if storage is None:
                continue  # a worker has just freed it
            try:
                values = torch.empty(one.bytes, dtype=torch.uint8)
            except RuntimeError:
                return None
            found.append((one, storage, values.copy_(self._bytes_of(storage))))
        return found

    def _run_to_pack(self, size: int) -> Stretch | None:
        return run_to_pack(self._extents(waits=True), self.start, self._end, size)

    def _bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _move(self, one: _Tensor) -> None:
        for copy in one.copies:
            copy.wait()
        # Moves the bytes for all tensors that view this storage, and frees the old piece.
        storage = storage_behind(one.storage.cdata)
        if storage is None:
            return  # a worker has just freed it
        storage.resize_(one.bytes)
        self._has_moved(one, storage)

    def _has_moved(self, one: _Tensor, storage: torch.UntypedStorage) -> None:
        self.moved_bytes += rounded(one.bytes)
        if self.start <= storage.data_ptr() < self._end:
            self._lies(storage.data_ptr(), one.bytes, one.storage, alone=True)

    def _held_gaps(self, run: Stretch) -> list[torch.Tensor | None] | None:
        """Allocate the gaps in a run; None if unknown memory lies in one of them."""
        self._sure_bytes = 0
        held = []
        for low, high in gaps_between(sorted(run.extents), run.start, run.end):
            held.append(self._hold(low, high - low))
            if held[-1] is None:
                return None
        return held

    def _hold(self, start: int, size: int) -> torch.Tensor | None:
        """Allocate a free piece of the segment; None, noted as foreign, if unknown memory lies there.

        Pieces are cut from the start of a gap. It may start earlier than assumed: by the margin left to the tensor
        before it, or by all of that tensor if a worker has just freed it.
        """
        strays = []
        for _ in range(_STRAYS):
            try:
                piece = self._empty(size)
            except torch.OutOfMemoryError:
                break
            if start - size < piece.data_ptr() < start + size:
                return piece
            strays.append(piece)
        self._foreign.append(Extent(start, start + size, False, size))
        return None

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)
