"""Pinned host memory, packed: many tensors in few blocks whose sizes the system does not round up."""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref

import torch

from ..layouts import span

log = logging.getLogger("offmate")

_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 1 << 22, 1 << 28
_LAST_BLOCK_BYTES = 1 << 20  # the smallest that is tried where the system refuses larger ones
_ALIGNMENT_BYTES = 512


class PinnedMemory:
    """An allocator of pinned host memory.

    torch pins powers of two, so that a tensor on its own may take nearly twice its bytes. Here blocks are powers of two
    and tensors lie side by side in them, each with its own storage; memory of dead tensors is reused.
    Source: OffMate, appendix C.

    State: `reserved_bytes`, pinned in total; `refused`, whether some memory was wanted that the system did not pin;
    `_refused_bytes`, the smallest block that it has refused; `_holes`, the free stretches of every block, changed under
    `_lock` since tensors may die on any thread.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self.refused = False
        self._refused_bytes: int | None = None
        self._blocks: list[torch.Tensor] = []
        self._holes: list[dict[int, int]] = []
        self._lock = threading.RLock()

    def empty_strided(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a host tensor, pinned if the system allows it."""
        n_bytes = span(shape, stride) * torch.empty((), dtype=dtype).element_size()
        raw = self._take(n_bytes) if n_bytes else None
        if raw is None:
            return torch.empty_strided(shape, stride, dtype=dtype)
        return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape, stride)

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a pinned copy of a tensor that is copied once; the tensor itself if pinning is refused."""
        if not self._may_pin(tensor.nbytes):
            return tensor
        try:
            return tensor.pin_memory()
        except RuntimeError:
            return tensor

    def stop(self) -> None:
        """Pin nothing more from now on."""
        self._refused_bytes, self.refused = 0, True

    def _take(self, n_bytes: int) -> torch.Tensor | None:
        size = -(-n_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        with self._lock:
            place = self._hole(size) or self._grow(size)
            if place is None:
                return None
            block, start = place
            length = self._holes[block].pop(start)
            if length > size:
                self._holes[block][start + size] = length - size
            memory = (ctypes.c_ubyte * n_bytes).from_address(self._blocks[block].data_ptr() + start)
        # The storage holds the ctypes object, which dies with it.
        weakref.finalize(memory, self._give_back, block, start, size).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _hole(self, size: int) -> tuple[int, int] | None:
        """Return the smallest free stretch that is large enough (best fit), as block and start."""
        fitting = [
            (length, block, start)
            for block, holes in enumerate(self._holes)
            for start, length in holes.items()
            if length >= size
        ]
        return min(fitting)[1:] if fitting else None

    def _grow(self, size: int) -> tuple[int, int] | None:
        # Blocks grow with the total, so that the last one, perhaps half empty, is a small part of it.
        usual = min(max(_LEAST_BLOCK_BYTES, self.reserved_bytes // 8), _MOST_BLOCK_BYTES)
        length = 1 << (max(size, usual) - 1).bit_length()
        while length >= max(size, _LAST_BLOCK_BYTES):
            if self._may_pin(length):
                try:
                    block = torch.empty(length, dtype=torch.uint8, pin_memory=True)
                except RuntimeError as error:
                    self._refused_bytes = length
                    log.debug("the system cannot pin another %d bytes (%s)", length, error)
                else:
                    self._blocks.append(block)
                    self._holes.append({0: length})
                    self.reserved_bytes += length
                    return len(self._blocks) - 1, 0
            length //= 2
        self._refuse()
        return None

    def _may_pin(self, n_bytes: int) -> bool:
        return self._refused_bytes is None or n_bytes < self._refused_bytes

    def _refuse(self) -> None:
        if not self.refused:
            log.warning(
                "the system pins no more RAM after %d bytes. Copies of memory that is not pinned go through small "
                "pinned buffers and are slower",
                self.reserved_bytes,
            )
        self.refused = True

    def _give_back(self, block: int, start: int, size: int) -> None:
        with self._lock:
            holes = self._holes[block]
            after = holes.pop(start + size, 0)
            before = next((s for s, length in holes.items() if s + length == start), None)
            if before is None:
                holes[start] = size + after
            else:
                holes[before] += size + after


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a dense tensor's memory as a flat tensor of bytes, in any order of dimensions; None if it has gaps."""
    if span(tensor.shape, tensor.stride()) != tensor.numel():
        return None
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
