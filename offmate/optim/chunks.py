"""Updates of float32 copies on the host, chunk by chunk, so that no float32 gradient of a whole tensor is ever made."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ..runtime.replay.contents import is_bulk
from ..runtime.torch_names.modules import bare_step

# Long enough that starting the optimizer takes little of a chunk's time, and 8 MiB of float32.
CHUNK_ELEMENTS = 2**21
_memory = threading.local()


def may_be_cut(param: torch.Tensor, grad: torch.Tensor, master: torch.Tensor, state: dict[str, Any]) -> bool:
    """Return whether a tensor on the host can be updated in chunks: a long one, in one piece as its state is."""
    tensors = [param, grad, master, *(value for value in state.values() if is_bulk(value))]
    return param.numel() > CHUNK_ELEMENTS and all(
        t.device.type == "cpu" and t.is_contiguous() and t.shape == param.shape for t in tensors
    )


@torch.no_grad()
def step_in_chunks(
    kind: Any,
    inner: Any,
    leaf: torch.nn.Parameter,
    param: torch.Tensor,
    gradient: torch.Tensor,
    factor: torch.Tensor | None = None,
    *,
    widened: bool = False,
    casts: bool = True,
) -> None:
    """Update float32 values by an element-wise optimizer, with the bits of one whole update.

    Parameters
    ----------
    kind: class of the optimizer. inner: an instance of it that holds only `leaf`, the values, with its state, which the
        first update makes. param: of lower precision, which follows them; or the same memory. factor: multiplies the
        gradient first, in place, or its float32 values if it is to be `widened` before; None for 1. casts: whether
        `param` gets the new values.
    """
    master, state = leaf.data, inner.state[leaf]
    grad, low, whole = gradient.view(-1), param.view(-1), master.view(-1)
    bulk = {key: value for key, value in state.items() if is_bulk(value)}
    made: dict[str, torch.Tensor] = {}
    starts = range(0, master.numel(), CHUNK_ELEMENTS)
    for start in starts:
        chunk = slice(start, start + CHUNK_ELEMENTS)
        leaf.data = whole[chunk]
        if factor is not None and not widened:  # here, while the chunk is in the processor's cache
            grad[chunk].mul_(factor)
        leaf.grad = _scratch(leaf.numel()).copy_(grad[chunk])
        if factor is not None and widened:
            leaf.grad.mul_(factor)
        # Scalars, such as the number of updates, advance once: with the last chunk.
        advances = start == starts[-1]
        given = inner.state[leaf] = {
            key: bulk[key].view(-1)[chunk] if key in bulk else value if advances else _copy(value)
            for key, value in state.items()
        }
        bare_step(kind)(inner)
        if casts and low.data_ptr() != whole.data_ptr():
            low[chunk].copy_(leaf)
        for key, value in given.items():
            if is_bulk(value):  # the first update makes tensors; later ones change them in place
                if key not in bulk and key not in made:
                    made[key] = torch.empty_like(master, dtype=value.dtype)
                part = (bulk if key in bulk else made)[key].view(-1)[chunk]
                if part.data_ptr() != value.data_ptr():
                    part.copy_(value)
    inner.state[leaf] = {key: bulk.get(key, made.get(key, value)) for key, value in given.items()}
    leaf.data, leaf.grad = master, None


@torch.no_grad()
def take_over_edits(param: torch.Tensor, master: torch.Tensor) -> None:
    """Give a float32 copy the elements of its parameter that are not the copy's, rounded, and so were edited.

    Each element is judged by itself, so that the result does not depend on where tensors are cut.
    """
    for low, whole in _pairs(param, master):
        ours, theirs = _bits(low, whole)
        if param.device.type != "cpu" or not torch.equal(ours, theirs):  # a look at a card's values would wait for it
            whole.copy_(torch.where(ours == theirs, whole, low.to(whole.dtype)))


@torch.no_grad()
def was_edited(param: torch.Tensor, master: torch.Tensor) -> bool:
    """Return whether any element of a parameter on the host is not its float32 copy's, rounded."""
    return any(not torch.equal(*_bits(low, whole)) for low, whole in _pairs(param, master))


def _pairs(param: torch.Tensor, master: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if not (param.is_contiguous() and master.is_contiguous()):
        return [(param, master)]
    return list(zip(param.view(-1).split(CHUNK_ELEMENTS), master.view(-1).split(CHUNK_ELEMENTS)))


def _bits(low: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy's elements, rounded, and the parameter's, as bits, since NaN is no edit."""
    return whole.to(low.dtype).view(torch.int16), low.view(torch.int16)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _scratch(elements: int) -> torch.Tensor:
    """Return memory of this thread, which the next chunk overwrites."""
    if not hasattr(_memory, "scratch"):
        with torch.inference_mode(False):  # memory made inside could not be used outside
            _memory.scratch = torch.empty(CHUNK_ELEMENTS, dtype=torch.float32, device="cpu")
    scratch: torch.Tensor = _memory.scratch[:elements]
    return scratch
