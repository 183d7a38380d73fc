"""Compares the duration of the first real steps with the plan's prediction."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Iterator

from ..plans.plan import Plan
from ..reports.units import format_seconds

log = logging.getLogger("offmate")

FIRST, LAST = 3, 8  # the steps that are compared; earlier ones warm up
_APART = 2.0
_WORTH_SAYING_S = 0.05  # in shorter steps, work around the plan's computes is a large part


class Pace:
    """Compares steps with their plan's prediction, once per plan, and logs a line if the prediction is far off.

    Whether a step is slow is judged by its time in offmate's own calls, so that the plan is not blamed for a slow data
    loader. Whether it is fast is judged by the time from the end of the step before to its end.

    State: the plan; how many steps it has made, and when the last one ended; seconds in calls since then, and, of the
    steps that are compared, in calls and in all.

    Parameters
    ----------
    compiled: whether blocks are compiled; steps may then
        be faster than predicted, since a plan predicts blocks that are not compiled.
    """

    def __init__(self, compiled: bool = False) -> None:
        self._compiled = compiled
        self._plan: Plan | None = None
        self._steps = 0
        self._ended_s = 0.0
        self._inside_s = 0.0
        self._compared: list[tuple[float, float]] = []

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Count the time of the body as time in offmate's calls."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._inside_s += time.perf_counter() - start

    def step_done(self, plan: Plan) -> None:
        """Note that a training step of this plan has ended."""
        now = time.perf_counter()
        if plan is not self._plan:
            self._plan, self._steps, self._compared = plan, 0, []
        self._steps += 1
        if FIRST <= self._steps <= LAST:
            self._compared.append((self._inside_s, now - self._ended_s))
        if self._steps == LAST:
            self._compare(plan)
        self._ended_s, self._inside_s = now, 0.0

    def _compare(self, plan: Plan) -> None:
        inside_s, all_s = (statistics.median(kind) for kind in zip(*self._compared))
        predicted_s = plan.predicted_step_s
        slow = inside_s > _APART * predicted_s
        fast = all_s < predicted_s / _APART and not self._compiled
        measured_s = inside_s if slow else all_s
        if not (slow or fast) or max(measured_s, predicted_s) < _WORTH_SAYING_S:
            return
        log.warning(
            "a step takes %s (median of steps %d to %d), but its plan predicts %s: it was timed on another machine, "
            "or on this one when it was %s. To measure again, start once with OFFMATE_MEASURE_AGAIN=1 in the "
            "environment, while nothing else runs",
            format_seconds(measured_s), FIRST, LAST, format_seconds(predicted_s),
            "less busy than now" if slow else "busier than now",
        )  # fmt: skip
