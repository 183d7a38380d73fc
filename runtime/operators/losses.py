"""Cross entropy in tiles of rows: what is as large as the logits in full precision exists for one tile at a time.

Between the head's matrix product and the loss, all is row by row: the cast, the log-softmax, and their backwards. The
forward keeps the log-probability of each row's target. The sum over rows is left to torch's own kernel, on a matrix of
one column, which adds in the same order; so all bits are those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_names.operators import log_softmax, log_softmax_backward

_TILE_ELEMENTS = 1 << 23  # of a tile; 32 MiB in float32
_TOGETHER = 32  # rows of a tile are a multiple: a row then starts at the same place of a cache line as in the whole
_IGNORED = -100  # stands for an ignored target where all others are 0

aten = torch.ops.aten
_LIBRARY = torch.library.Library("offmate", "FRAGMENT")
_LIBRARY.define(
    "tiled_cross_entropy(Tensor logits, Tensor target, int reduction, SymInt ignore_index, ScalarType dtype)"
    " -> (Tensor loss, Tensor picked, Tensor total_weight)"
)
_AFTER = "Tensor target, Tensor picked, Tensor total_weight, int reduction, SymInt ignore_index"
_LIBRARY.define(f"tiled_cross_entropy_backward(Tensor grad, Tensor logits, {_AFTER}) -> Tensor")
_LIBRARY.define(f"tiled_cross_entropy_backward_(Tensor grad, Tensor(a!) logits, {_AFTER}) -> Tensor(a!)")


def rows_of_tile(classes: int) -> int:
    """Return the rows of a tile for logits of so many classes."""
    return max(_TOGETHER, _TILE_ELEMENTS // max(classes, 1) // _TOGETHER * _TOGETHER)


@dataclass(frozen=True)
class InTiles:
    """What an operator in tiles takes, where only the shape and the dtype of the logits are read.

    Parameters
    ----------
    logits: which argument holds the logits. tiles: tiles in full precision that exist at once.
    full_passes, own_passes: how often all kernels together read or write the logits, in full precision or their own.
    """

    logits: int
    tiles: int
    full_passes: int
    own_passes: int

    def workspace_bytes(self, logits: torch.Tensor, dtype: torch.dtype) -> int:
        """Return the bytes of the tiles that exist at once."""
        rows = min(rows_of_tile(logits.shape[1]), logits.shape[0])
        return self.tiles * rows * logits.shape[1] * dtype.itemsize

    def moved_bytes(self, logits: torch.Tensor, dtype: torch.dtype) -> int:
        """Return the bytes of device memory that the kernels of all tiles read and write."""
        return logits.numel() * (self.own_passes * logits.dtype.itemsize + self.full_passes * dtype.itemsize)


def _tiles(logits: torch.Tensor) -> Iterator[slice]:
    rows = rows_of_tile(logits.shape[1])
    for first in range(0, logits.shape[0], rows):
        yield slice(first, min(first + rows, logits.shape[0]))


def _log_softmax(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    found: torch.Tensor = log_softmax(logits.to(dtype), 1, False)
    return found


def _forward(
    logits: torch.Tensor, target: torch.Tensor, reduction: int, ignore_index: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    column = _column(target, ignore_index)
    picked = torch.empty(logits.shape[0], 1, dtype=dtype, device=logits.device)
    for tile in _tiles(logits):
        torch.gather(_log_softmax(logits[tile], dtype), 1, column[tile], out=picked[tile])
    loss, total = aten.nll_loss_forward.default(picked, _in_column(target, ignore_index), None, reduction, _IGNORED)
    return loss, picked, total


def _backward(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, picked: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """Make the gradient beside the logits.

    Raises: RuntimeError if the logits, which the user may have, too, are no longer those of the forward.
    """
    again = torch.empty_like(picked)
    made = _backward_into(torch.empty_like(logits), again, grad, logits, target, picked, *rest)
    if bool(((again != picked) & ~(again.isnan() & picked.isnan())).any()):
        raise RuntimeError(
            "the logits that the model returned were changed before backward(), through .data, numpy or another view, "
            "but their loss reads them again. Change a copy instead: logits.detach().clone()"
        )
    return made


def _backward_in_place(grad: torch.Tensor, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _backward_into(logits, None, grad, logits, *rest)


def _backward_into(
    made: torch.Tensor,
    again: torch.Tensor | None,
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    picked: torch.Tensor,
    total_weight: torch.Tensor,
    reduction: int,
    ignore_index: int,
) -> torch.Tensor:
    """Fill `made`, which may be the logits themselves: a tile is read before it is written.

    Parameters
    ----------
    again: takes the log-probabilities of the targets as the logits are now, None if nobody asks.
    """
    column, dtype = _column(target, ignore_index), picked.dtype
    small = _in_column(target, ignore_index)
    rows = aten.nll_loss_backward.default(grad, picked, small, None, reduction, _IGNORED, total_weight)
    for tile in _tiles(logits):
        chosen = torch.zeros(logits[tile].shape, dtype=dtype, device=logits.device)
        chosen.scatter_(1, column[tile], rows[tile])
        out = _log_softmax(logits[tile], dtype)
        if again is not None:
            torch.gather(out, 1, column[tile], out=again[tile])
        made[tile] = log_softmax_backward(chosen, out, 1, dtype)
    return made


def _column(target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return each row's target as an index; an ignored row's is 0, and no other is changed, so that wrong ones fail."""
    return target.masked_fill(target == ignore_index, 0).unsqueeze(1)


def _in_column(target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the targets in the matrix of one column that holds what was picked."""
    return torch.zeros_like(target).masked_fill(target == ignore_index, _IGNORED)


def _setup(ctx, inputs, output):
    logits, target, ctx.reduction, ctx.ignore_index, _ = inputs
    _, picked, total_weight = output
    ctx.save_for_backward(logits, target, picked, total_weight)
    ctx.mark_non_differentiable(picked, total_weight)


def _differentiate(ctx, grad, *_):
    made = tiled_cross_entropy_backward(grad, *ctx.saved_tensors, ctx.reduction, ctx.ignore_index)
    return made, None, None, None, None


_LIBRARY.impl("tiled_cross_entropy", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("tiled_cross_entropy_backward", _backward, "CompositeExplicitAutograd")
_LIBRARY.impl("tiled_cross_entropy_backward_", _backward_in_place, "CompositeExplicitAutograd")
torch.library.register_autograd("offmate::tiled_cross_entropy", _differentiate, setup_context=_setup, lib=_LIBRARY)


@torch.library.register_fake("offmate::tiled_cross_entropy", lib=_LIBRARY)
def _(logits, target, reduction, ignore_index, dtype):
    rows = logits.shape[0]
    loss = logits.new_empty((rows,) if reduction == 0 else (), dtype=dtype)
    return loss, logits.new_empty((rows, 1), dtype=dtype), logits.new_empty((), dtype=dtype)


@torch.library.register_fake("offmate::tiled_cross_entropy_backward", lib=_LIBRARY)
def _(grad, logits, target, picked, total_weight, reduction, ignore_index):
    return torch.empty_like(logits)


@torch.library.register_fake("offmate::tiled_cross_entropy_backward_", lib=_LIBRARY)
def _(grad, logits, target, picked, total_weight, reduction, ignore_index):
    return logits


tiled_cross_entropy = torch.ops.offmate.tiled_cross_entropy.default
"""tiled_cross_entropy(logits, target, reduction, ignore_index, dtype): the loss of logits cast to that dtype, the
log-probabilities of the targets, and the number of targets that count."""
tiled_cross_entropy_backward = torch.ops.offmate.tiled_cross_entropy_backward.default
"""tiled_cross_entropy_backward(grad, logits, target, picked, total_weight, reduction, ignore_index): the logits'
gradient, in their dtype."""
tiled_cross_entropy_backward_ = torch.ops.offmate.tiled_cross_entropy_backward_.default
"""The same, written over the logits."""

# All begin with a cast, which reads the logits and writes a tile, and a log-softmax, which reads and writes one.
IN_TILES: dict[Any, InTiles] = {
    tiled_cross_entropy: InTiles(logits=0, tiles=2, full_passes=3, own_passes=1),
    tiled_cross_entropy_backward: InTiles(logits=1, tiles=3, full_passes=8, own_passes=2),
    tiled_cross_entropy_backward_: InTiles(logits=1, tiles=3, full_passes=8, own_passes=2),
}
