"""The surroundings in which a model is planned for another machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..capture.fake import fake_batch, faked, stand_in
from ..capture.true_strides import fake_kernels_believed
from ..guards.surroundings import autocast_on_cpu

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@contextlib.contextmanager
def as_elsewhere(model: torch.nn.Module, batch: Batch) -> Iterator[tuple[Batch, Batch]]:
    """Let a model stand for one on another machine; give its fake batch, and a real one for decisions about data.

    Parameters
    ----------
    batch: positional and keyword arguments, perhaps on the meta device.
    """
    real = stand_in(batch)
    with autocast_on_cpu(), fake_kernels_believed(), faked(model) as mode:
        yield fake_batch(mode, batch), real
