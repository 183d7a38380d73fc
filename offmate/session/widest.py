"""The batch for which micro-batches of different shapes are planned, all of them in the same steps."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.tracing import PRINTS_FAILED_KERNELS
from .variants import Call

_MOST_LARGER = 2  # times the elements of the largest batch that a made-up one may have


def largest(calls: Sequence[Call]) -> Call:
    """Return the call whose tensors have the most elements."""
    return max(calls, key=lambda call: call.kind.n_elements)


def widest(calls: Sequence[Call]) -> Call:
    """Return a call that is at least as large as each of several ones in every dimension of every tensor.

    Returns: the largest one, if it is, or if they do not have the same tensors. Otherwise one that is made up, whose
    tensors repeat those of the largest one: a plan is made for it, but it never runs. Operators are timed for it, so
    one of much more elements than any real batch has is not made up.
    """
    most = largest(calls)
    if len({call.kind.without_shapes for call in calls}) > 1:
        return most
    shapes = [tuple(map(max, zip(*same))) for same in zip(*(call.kind.shapes for call in calls))]
    if list(most.kind.shapes) == shapes or any(0 in shape for shape in most.kind.shapes):
        return most
    if sum(map(math.prod, shapes)) > _MOST_LARGER * most.kind.n_elements:
        return most
    tensors = [tensor for tensor in most.tensors if tensor is not None]
    made = {id(tensor): _repeated(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True)}

    def larger(arguments: Any) -> Any:
        return pytree.tree_map(lambda leaf: made.get(id(leaf), leaf), arguments)

    args, kwargs = larger((most.args, most.kwargs))
    return replace(most, args=args, kwargs=kwargs, given=larger(most.given))


@contextlib.contextmanager
def made_up() -> Iterator[None]:
    """Keep torch inside from printing a traceback if a batch that nobody has made does not suit a model."""
    printing = logging.getLogger(PRINTS_FAILED_KERNELS)
    before, printing.disabled = printing.disabled, True
    try:
        yield
    finally:
        printing.disabled = before


def _repeated(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of a larger shape with the same values again and again; itself if it has this shape."""
    for dim, size in enumerate(shape):
        own = tensor.shape[dim]
        if size > own:
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % own)
    return tensor
