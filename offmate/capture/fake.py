"""Models without memory: fake tensors replace the parameters, so that a model can be captured and its bytes counted.

For a card of this machine they are on that card, so that the captured graph is what eager mode runs there. For a card
of another machine they are on the CPU rather than on meta, where attention traces to its plain formula (S x S matrices
kept). On the CPU it stays one node that keeps its output and a log-sum-exp per row, as a card's fused kernel does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.modules import buffers_of, parameters_of
from ..runtime.torch_names.tensors import storage_key
from ..runtime.torch_names.tracing import FakeTensor, FakeTensorMode

_CPU = torch.device("cpu")


@contextlib.contextmanager
def faked(model: torch.nn.Module, device: torch.device = _CPU) -> Iterator[FakeTensorMode]:
    """Replace the model's parameters and buffers inside the body by fake tensors of the same shapes and dtypes.

    A tied parameter stays tied. Returns: the mode that the fake tensors belong to.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}
    kept: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    tables: list[dict[str, Any]] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            with mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, tensor.requires_grad)
            fakes[id(tensor)] = empty
        return fakes[id(tensor)]

    for module in model.modules():
        tables += [parameters_of(module), buffers_of(module)]
    kept += [(table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None]
    try:
        for table, name, tensor in kept:
            table[name] = fake(tensor)
        yield mode
    finally:
        for table, name, tensor in kept:
            table[name] = tensor


def fake_batch(mode: FakeTensorMode, batch: Any, device: torch.device = _CPU) -> Any:
    """Return the batch with new fake tensors of the same strides.

    Parameters
    ----------
    batch: tensors on any device, meta included, in any structure.
    """

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with mode:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)

    return pytree.tree_map(fake, batch)


def stand_in(batch: Any) -> Any:
    """Return a batch with data for data-dependent decisions: meta tensors become ones (nothing padded or packed)."""

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "meta":
            return leaf
        return torch.ones(leaf.shape, dtype=leaf.dtype)

    return pytree.tree_map(real, batch)


def is_without_memory(model: torch.nn.Module) -> bool:
    """Return whether some of the model's parameters have no data."""
    return any(p.device.type == "meta" for p in model.parameters())


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors in the same memory share: their address, or, if they have none, their storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if has_address(tensor) else storage_key(storage)


def has_address(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own; meta and fake tensors have none."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
