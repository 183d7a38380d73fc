"""Search for the batch size with the most samples per second, by scaling one problem (OffMate, appendix A)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from .problem import Block, Option, Problem
from .solve import solve

WORTH = 1.005  # a larger batch must be faster by this factor, so that ties go to the smaller one
_LARGEST = 4096


@dataclass(frozen=True)
class BatchSizeTrial:
    """A batch size and the predicted seconds of an iteration with it; infinite if it does not fit.

    Parameters
    ----------
    batch_size: samples of a micro-batch. micro_batches: of an iteration.
    """

    batch_size: int
    step_s: float
    micro_batches: int = 1

    @property
    def samples_per_s(self) -> float:
        """Samples per second."""
        return self.batch_size * self.micro_batches / self.step_s if self.step_s > 0 else 0.0


def scaled(problem: Problem, factor: float) -> Problem:
    """Return the problem with a batch `factor` times as large.

    Activations, computes and the user's part grow with it; parameters, their gradients, states and updates do not.

    Source: OffMate, appendix A: "computation times depend linearly on the batch size".
    """

    def size(amount_bytes: int) -> int:
        return ceil(amount_bytes * factor)

    gradients = [0] * problem.n_blocks
    for group in problem.groups:
        if group.grad_steps:
            gradients[2 * problem.n_blocks - 1 - group.grad_steps[0]] += group.grad_bytes

    def option(own: Option, made_bytes: int) -> Option:
        made_bytes = min(made_bytes, own.backward_peak_bytes)
        return replace(
            own,
            saved_bytes=size(own.saved_bytes),
            offloaded_bytes=size(own.offloaded_bytes),
            **_seconds(own, factor),
            forward_peak_bytes=size(own.forward_peak_bytes),
            backward_peak_bytes=size(own.backward_peak_bytes - made_bytes) + made_bytes,
        )

    blocks = zip(problem.blocks, gradients)
    return replace(
        problem,
        blocks=tuple(Block(b.name, tuple(option(o, made) for o in b.options)) for b, made in blocks),
        values=tuple(replace(v, bytes=size(v.bytes), grad_bytes=size(v.grad_bytes)) for v in problem.values),
        shared=tuple(replace(x, bytes=size(x.bytes)) for x in problem.shared),
        outputs=tuple(replace(o, bytes=size(o.bytes), grad_bytes=size(o.grad_bytes)) for o in problem.outputs),
        user_bytes=size(problem.user_bytes),
        start_s=problem.start_s * factor,
        start_peak_bytes=size(problem.start_peak_bytes),
    )


def _seconds(own: Option, factor: float) -> dict[str, Any]:
    """Return an option's seconds with a larger batch: the device computes more, and the host launches as much."""
    if own.launched is None:
        return {"forward_s": own.forward_s * factor, "backward_s": own.backward_s * factor}
    forward_s, backward_s = own.launched.forward_device_s * factor, own.launched.backward_device_s * factor
    return {
        "forward_s": max(forward_s, own.launched.forward_launch_s),
        "backward_s": max(backward_s, own.launched.backward_launch_s),
        "launched": replace(own.launched, forward_device_s=forward_s, backward_device_s=backward_s),
    }


def try_batch_sizes(
    problem: Problem,
    batch_size: int,
    *,
    time_limit_s: float = 20.0,
    gap: float = 0.01,
    backend: str | None = None,
) -> Iterator[BatchSizeTrial]:
    """Solve the problem for batches of other sizes until more samples at once bring no more samples per second.

    Parameters
    ----------
    problem: stated for a batch of `batch_size` samples. time_limit_s, gap, backend: as in `solve`, for each solve.

    Returns: trials in the order in which they are made: sizes are doubled while that helps and halved while that does
        not hurt; then the midpoints between the best size and its neighbours follow.
    """

    def attempt(size: int) -> BatchSizeTrial:
        found = solve(scaled(problem, size / batch_size), time_limit_s=time_limit_s, gap=gap, backend=backend)
        return BatchSizeTrial(size, found.objective_s, problem.per_update)

    yield from _climb(attempt, batch_size)


def _climb(attempt: Callable[[int], BatchSizeTrial], first: int) -> Iterator[BatchSizeTrial]:
    known: dict[int, BatchSizeTrial] = {}

    def measured(size: int) -> Iterator[BatchSizeTrial]:
        if size not in known and 1 <= size <= _LARGEST:
            known[size] = attempt(size)
            yield known[size]

    yield from measured(first)
    size = first
    while size > 1 and known[size].step_s == inf:
        size //= 2
        yield from measured(size)
    while size <= _LARGEST and best(known.values()).batch_size == size:
        size *= 2
        yield from measured(size)
    while (top := best(known.values()).batch_size) == min(known) and top > 1:
        yield from measured(top // 2)
    smaller, larger = max((s for s in known if s < top), default=top), min((s for s in known if s > top), default=top)
    yield from measured((smaller + top) // 2)
    yield from measured((top + larger) // 2)


def best(trials: Iterable[BatchSizeTrial]) -> BatchSizeTrial:
    """Return the trial with the most samples per second; of practically equal ones the smallest."""
    found = None
    for trial in sorted(trials, key=lambda t: t.batch_size):
        if found is None or trial.samples_per_s > WORTH * found.samples_per_s:
            found = trial
    assert found is not None, "best of no trials"
    return found
