"""Batch sizes: resizes the example batch, and searches for the size that trains fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import torch

from ..errors import InfeasibleBudget, OffmateError
from ..plans.plan import Plan
from ..progress import Progress
from ..runtime.torch_names import trees as pytree
from ..solver.batch_size import best, try_batch_sizes
from ..solver.problem import Problem

log = logging.getLogger("offmate")

_MOST_SAMPLES = 1 << 24


def batch_size_of(batch: Any) -> int:
    """Return how many samples a batch holds: the first dimension of its first tensor that has one.

    Raises: OffmateError if no tensor has one.
    """
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0]
    raise OffmateError("batch_size= needs example_inputs with a tensor whose first dimension counts the samples")


def resized(batch: Any, batch_size: int) -> Any:
    """Resize a batch to `batch_size` samples, by repeating its samples or by keeping the first ones.

    Parameters
    ----------
    batch: tensors in any structure. Those whose first dimension equals the batch's size are changed.
    """
    size = batch_size_of(batch)
    if batch_size == size:
        return batch
    rows = torch.arange(batch_size) % size

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != size:
            return leaf
        return leaf.index_select(0, rows.to(leaf.device))

    return pytree.tree_map(resize, batch)


def check_batch_size(batch_size: object) -> None:
    """Raise OffmateError if `batch_size` is neither "auto", None nor a whole number above 0."""
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool) and 0 < batch_size <= _MOST_SAMPLES
    if not (whole or batch_size is None or (isinstance(batch_size, str) and batch_size == "auto")):
        raise OffmateError(
            f'batch_size is {batch_size!r}; it must be a whole number above 0, at most {_MOST_SAMPLES:,}, or "auto"'
        )


def fastest_batch_size(problem: Problem, batch_size: int, time_limit_s: float, gap: float, say: Progress) -> int:
    """Find the batch size with the most predicted samples per second.

    Parameters
    ----------
    problem: for a batch of `batch_size`. time_limit_s, gap: for each of about eight solves. say: reports progress.

    Source: OffMate, appendix A.
    """
    trials = []
    for trial in try_batch_sizes(problem, batch_size, time_limit_s=time_limit_s, gap=gap):
        trials.append(trial)
        words = "does not fit" if trial.step_s == inf else f"{trial.samples_per_s:.3g} samples/s"
        say(f"batch size {trial.batch_size}: {words}", 0.0)
        log.info("batch size %d: %s", trial.batch_size, words)
    return best(trials).batch_size


def planned_within(planned: Callable[[int], Plan], batch_size: int) -> Plan:
    """Plan for a batch of `batch_size`, halving it until it fits.

    Raises: InfeasibleBudget if a single sample does not fit.
    """
    while True:
        try:
            return replace(planned(batch_size), batch_size=batch_size)
        except InfeasibleBudget:
            if batch_size == 1:
                raise
        log.info("a batch of %d does not fit; trying %d", batch_size, batch_size // 2)
        batch_size //= 2
