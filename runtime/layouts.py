"""Tensors and the storages behind them: copies in another layout, and views of whole storages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def as_layout(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], device: torch.device | None = None
) -> torch.Tensor:
    """Return a copy of `tensor` in its own storage, with the given strides.

    Parameters
    ----------
    device: device of the copy, None for the tensor's own.
    """
    own = torch.empty_strided(size, stride, dtype=tensor.dtype, device=device or tensor.device)
    target, source = without_repeats(own, tensor)
    target.copy_(source)
    return own


def steps_of(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the strides of dimensions whose size is not 1; a kernel may give the others any stride."""
    return [step for step, n in zip(stride, size) if n != 1]


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements of a storage lie from a tensor's first one to its last one."""
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride))


def without_repeats(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts of two tensors to copy: of dimensions with stride 0, which repeat one element, only the first.

    Parameters
    ----------
    target: a tensor of any strides. source: one of the same size, which repeats the elements that the target repeats.

    Returns: views of both.
    """
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    return target, source


def storage_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage behind a tensor as one flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def on_storage(flat: torch.Tensor, like: torch.Tensor, start_bytes: int = 0) -> torch.Tensor:
    """Return the tensor that views `flat`'s storage as `like` views its own.

    Parameters
    ----------
    start_bytes: where in `flat`'s storage that of `like` begins, a multiple of its element size.
    """
    view = torch.empty(0, dtype=like.dtype, device=flat.device)
    start = start_bytes // like.element_size()
    return view.set_(flat.untyped_storage(), start + like.storage_offset(), like.shape, like.stride())


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that has the same shape, strides, offset and dtype."""
    whole = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
    return on_storage(whole, tensor)


def same_tensors(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether tensors have the same names, layouts and bits, so that those of one mapping serve for both."""
    return own.keys() == other.keys() and all(_same(own[name], other[name]) for name in own)


def _same(own: torch.Tensor, other: torch.Tensor) -> bool:
    if own is other:
        return True
    strided = own.layout is other.layout is torch.strided
    return strided and _described(own) == _described(other) and torch.equal(storage_view(own), storage_view(other))


def _described(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.device, type(tensor)
