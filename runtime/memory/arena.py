"""One large segment of an accelerator's memory, in which tensors move aside for one that finds no place."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import torch

from ..events import Event
from ..torch_names.tensors import StorageWeakRef, has_expired, storage_behind
from .compaction import LEAST_CUT_BYTES, Extent, Stretch, cheapest_run, first_without_place, gaps_between
from .pools import SMALL_SEGMENT_BYTES, large_sizes, rounded

_ROUNDS = 30  # of moves for one allocation
_STRAYS = 64  # pieces of the same size elsewhere that are taken before the right one


@dataclass(eq=False)
class _Tensor:
    """Memory of a tensor, and the copies that read or write it.

    `end`: of the piece that it has, for which it may have too little by what an allocator does not cut off, unless it
    is `sure`. `fixed`: somebody else may use its address.
    """

    start: int
    end: int
    bytes: int
    storage: StorageWeakRef
    sure: bool
    fixed: bool = False
    copies: list[Event] = field(default_factory=list)


class Arena:
    """Sees to it that large tensors find place in one segment of the allocator's.

    The allocator alone decides where a tensor lies: it takes the smallest gap that is large enough. Where no gap is,
    some tensors leave for smaller ones, by copies on the computing stream, until there is one. What was launched before
    reads them where they were, what is launched later where they are; copies on other streams are waited for on that
    stream, and tensors of which a copy is still to be launched stay.

    Changed on the executor's thread only. State: `start` and `_end` of the segment; `_tensors` by where they start, and
    in order `_starts`, `_ends` (later where one is not sure), `_weak` pointers to their storages; `_foreign`, gaps
    in which something lies that is not known; `_sure_bytes`, which certainly lie in one gap; `_anchor`, a piece that
    keeps the segment from being given back; `moved_bytes` so far.

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
        """Have the allocator reserve the segment, and nothing else that it need not, before an iteration starts.

        Where tensors of the user's lie in an earlier segment and both would not fit, that one has to do.
        """
        self._anchor = None
        self.forget_gaps()
        torch.accelerator.empty_cache()
        if not segment_bytes:
            self.start = self._end = 0
            return
        with contextlib.suppress(torch.OutOfMemoryError):
            start = self._empty(segment_bytes).data_ptr()  # let go at once, and kept
            for known in (self._tensors, self._starts, self._ends, self._weak):
                known.clear()
            self.start, self._end = start, start + segment_bytes
        self._anchor = self._piece_of_segment()

    def _piece_of_segment(self) -> torch.Tensor | None:
        """The least piece that large tensors are given; None if the segment has none.

        Gaps beside what lies elsewhere (a library's workspace) come first, since they are smaller.
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
        """Nothing of an iteration is on the device any more: whoever needs the segment's memory may have it."""
        self._anchor = None

    def room(self, sizes: Iterable[int]) -> None:
        """See that tensors of these bytes, which are allocated next and together, find place."""
        wanted = large_sizes(sizes)
        total = sum(wanted)
        if not wanted or self._anchor is None:
            return
        for _ in range(_ROUNDS):
            if total <= self._sure_bytes:
                break
            lengths = self._gap_lengths()
            short = first_without_place(lengths, wanted)
            if short is None:
                self._sure_bytes = max(lengths[-1], total)
                break
            # Whoever waits for a copy under way holds up the computing stream.
            run = self._run(short, waits=False) or self._run(short, waits=True)
            if run is None:
                break  # the allocator says what it has
            self._clear(run)
        self._sure_bytes = max(0, self._sure_bytes - total)

    def note(self, tensor: torch.Tensor, *, alone: bool = False) -> None:
        """A tensor has been allocated; nothing is forgotten of one that is known.

        Parameters
        ----------
        alone: nothing else has been allocated or let go since.
        """
        storage = tensor.untyped_storage()
        start, weak = storage.data_ptr(), StorageWeakRef(storage)
        known = self._tensors.get(start)
        if self.start <= start < self._end and (known is None or known.storage.cdata != weak.cdata):
            self._lies(start, storage.nbytes(), weak, alone)

    def fix(self, tensor: torch.Tensor) -> None:
        """Somebody else may use a tensor's address from now on."""
        self.note(tensor)
        known = self._tensors.get(tensor.untyped_storage().data_ptr())
        if known is not None:
            known.fixed = True

    def copied(self, tensor: torch.Tensor, event: Event) -> None:
        """A copy from or to a tensor is under way."""
        known = self._tensors.get(tensor.untyped_storage().data_ptr())
        if known is not None:
            known.copies.append(event)

    def forget_gaps(self) -> None:
        """Somebody else may have allocated."""
        self._sure_bytes = 0
        self._foreign.clear()

    def _lies(self, start: int, size: int, storage: StorageWeakRef, alone: bool) -> None:
        """A tensor lies at an address; what is too little to be cut off belongs to its piece."""
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
        """Bytes of the gaps, ascending; at least so many, where the end of what lies before one is not sure."""
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
        """What lies in the segment, in order.

        Parameters
        ----------
        waits: whether what a copy reads or writes may move, if that is launched.
        """
        assert self._anchor is not None
        self._forget_dead()
        anchor = self._anchor.data_ptr()
        found = [*self._foreign, Extent(anchor, anchor + SMALL_SEGMENT_BYTES, False)]
        for start, end in zip(self._starts, self._ends):
            one = self._tensors[start]
            one.copies = [copy for copy in one.copies if not (copy.ready() and copy.done())]
            movable = all(copy.ready() for copy in one.copies) if waits else not one.copies
            found.append(Extent(start, min(end, self._end), movable and not one.fixed))
        found.sort()
        edges = [*(one.start for one in found[1:]), self._end]
        return [one._replace(end=min(one.end, edge)) for one, edge in zip(found, edges)]

    # -- moves --------------------------------------------------------------------------------------------------------

    def _clear(self, run: Stretch) -> None:
        """Move everything out of a run; what is free in it is held meanwhile, so that nothing moves into it."""
        self._sure_bytes = 0
        pieces = [(low, high - low) for low, high in gaps_between(sorted(run.extents), run.start, run.end)]
        held = []
        for start, size in pieces:
            held.append(self._hold(start, size))
            if held[-1] is None:
                return
        for extent in run.extents:
            one = self._forget(bisect_left(self._starts, extent.start))
            self._move(one)
            held.append(self._hold(one.start, rounded(one.bytes)))
            if held[-1] is None:
                return

    def _move(self, one: _Tensor) -> None:
        for copy in one.copies:
            copy.wait()
        # The same bytes elsewhere, for all tensors that view this storage; where they were is free from now on.
        storage = storage_behind(one.storage.cdata)
        if storage is None:
            return  # a worker has just let go of it
        storage.resize_(one.bytes)
        self.moved_bytes += rounded(one.bytes)
        if self.start <= storage.data_ptr() < self._end:
            self._lies(storage.data_ptr(), one.bytes, one.storage, alone=True)

    def _hold(self, start: int, size: int) -> torch.Tensor | None:
        """Allocate a free piece of the segment; None, noted, if something that is not known lies there.

        Pieces are cut from where a gap begins: sooner, by what was left to the tensor before for safety, or by all of
        that tensor if a worker has just let go of it.
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
        self._foreign.append(Extent(start, start + size, False))
        return None

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)
