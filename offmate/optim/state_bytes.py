"""Bytes of an optimizer's state for a tensor that is too large for a trial update, or has no data."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..runtime.replay.contents import is_bulk
from .updater import Updater

_PRIMES = (2, 3, 5, 7, 11, 13)


def state_bytes(updater: Updater, like: torch.Tensor, hyper: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of state that move with a tensor, and the bytes of scalars that stay."""
    parts, scalars = state_parts(updater, like, hyper)
    return sum(parts), scalars


def state_parts(updater: Updater, like: torch.Tensor, hyper: dict[str, Any]) -> tuple[list[int], int]:
    """Return the bytes of each state tensor that moves with a tensor, and the bytes of scalars that stay.

    A tiny tensor with a different prime in every dimension is updated instead; each dimension of its state then stands
    for the dimension of `like` that has the same prime.

    Parameters
    ----------
    like: shape and dtype of the parameter; no data are read. hyper: the group's hyperparameters.
    """
    primes = _PRIMES[: like.dim()]
    real = dict(zip(primes, like.shape)) | {math.prod(primes): like.numel(), 1: 1}
    state: dict[str, Any] = {}
    tiny = torch.zeros(primes, dtype=like.dtype)
    updater.step_one(hyper, tiny, torch.zeros_like(tiny), state)
    bulk: list[int] = []
    scalars = 0
    for value in state.values():
        if isinstance(value, torch.Tensor):
            if is_bulk(value):
                bulk.append(math.prod(real.get(n, n) for n in value.shape) * value.element_size())
            else:
                scalars += value.element_size()
    return bulk, scalars
