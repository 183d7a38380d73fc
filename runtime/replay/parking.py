"""Parking: the memory of an iteration on the device, moved to the host while something else runs tcontents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ..ledger import Level
from .contents import Contents


@dataclass(frozen=True)
class Parked:
    """The storages that were emptied, each with its bytes, and the ledger's level before."""

    storages: tuple[tuple[torch.UntypedStorage, torch.Tensor], ...]
    level: Level


def park(contents: Contents, stays: Iterable[torch.Tensor]) -> tuple[tuple[torch.UntypedStorage, torch.Tensor], ...]:
    """Move the memory of everything on the device to the host; tensors keep their views of it.

    Parameters
    ----------
    contents: the device's contents, with no copy under way. stays: tensors whose memory other code reads meanwhile.
    """
    seen = {tensor.untyped_storage().data_ptr() for tensor in stays}
    parked = []
    for tensor in _tensors(contents):
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        parked.append((storage, _flat(storage).cpu().clone()))
    # All at the end: memory freed earlier could be mistaken for another storage's.
    for storage, _ in parked:
        storage.resize_(0)
    return tuple(parked)


def unpark(parked: Parked) -> None:
    """Bring parked memory back to the device."""
    for storage, home in parked.storages:
        storage.resize_(home.numel())
        _flat(storage).copy_(home)


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _tensors(contents: Contents) -> Iterator[torch.Tensor]:
    batches = contents.batches.values()
    for buffer in contents.buffers():
        yield from buffer.tensors.values()
    yield from contents.model_buffers.values()
    for batch in batches:
        for tensors in (batch.shared, batch.outputs, batch.grads):
            yield from tensors.values()
    yield from contents.returned.values()
    for saved in (saved for batch in batches for saved in batch.saved.values()):
        yield from saved.registers.values()
