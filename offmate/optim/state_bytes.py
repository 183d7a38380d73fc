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

    Parameters
    ----------
    like: shape and dtype of the parameter; no data are read. hyper: the group's hyperparameters.
    """
    forms, scalars = _found(updater, like, hyper)
    return [math.prod(shape) * dtype.itemsize for shape, dtype in forms.values()], scalars


def state_forms(updater: Updater, like: torch.Tensor, hyper: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a tensor on meta for each part of the state that moves with a tensor, with its shape, strides and dtype.

    Parameters are as in `state_parts`. Parts of the tensor's shape are taken to have its strides.
    """
    forms, _ = _found(updater, like, hyper)
    return {
        key: torch.empty_strided(shape, like.stride(), dtype=dtype, device="meta")
        if shape == tuple(like.shape)
        else torch.empty(shape, dtype=dtype, device="meta")
        for key, (shape, dtype) in forms.items()
    }


def _found(
    updater: Updater, like: torch.Tensor, hyper: dict[str, Any]
) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], int]:
    """Return the shape and the dtype of each part of the state that moves with a tensor, and the bytes of scalars.

    A tiny tensor with a different prime in every dimension is updated instead; each dimension of its state then stands
    for the dimension of `like` that has the same prime.
    """
    primes = _PRIMES[: like.dim()]
    real = dict(zip(primes, like.shape)) | {math.prod(primes): like.numel(), 1: 1}
    state: dict[str, Any] = {}
    tiny = torch.zeros(primes, dtype=like.dtype)
    updater.step_one(hyper, tiny, torch.zeros_like(tiny), state)
    bulk: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    scalars = 0
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            if is_bulk(value):
                bulk[key] = tuple(real.get(n, n) for n in value.shape), value.dtype
            else:
                scalars += value.element_size()
    return bulk, scalars
