"""The trace of a recorded iteration, as a user holds it: what really happened, next to what was predicted."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..reports.measured import measured_timeline
from ..reports.timeline import Timeline, build_timeline
from ..reports.units import format_seconds
from ..runtime.trace import Recording
from ..sizes import format_bytes
from ..solver.resources import Resource
from ..solver.simulate import simulate
from .about import UNKNOWN, About

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Trace:
    """One training iteration as it happened, with its prediction.

    Parameters
    ----------
    recording: the actions of the schedule with their times and bytes, and the jobs of the workers.
    budget_bytes: the device budget that was kept. about: what its plan is of.
    """

    recording: Recording
    budget_bytes: int
    about: About = UNKNOWN

    @cached_property
    def measured(self) -> Timeline:
        """The measured timeline: what every resource did when, where the executor waited, what was on the device."""
        return measured_timeline(self.recording, self.budget_bytes)

    @cached_property
    def predicted(self) -> Timeline:
        """The same timeline as the plan's dry run predicts it."""
        schedule = self.recording.schedule
        return build_timeline(
            schedule, simulate(schedule), fixed_bytes=self.recording.fixed_bytes, budget_bytes=self.budget_bytes
        )

    @property
    def step_s(self) -> float:
        """Seconds from the start of the forward to the end of the optimizer's step, your code between them included."""
        return self.recording.step_s

    @property
    def launch_s(self) -> float:
        """Seconds of `step_s` in which the training thread launched the actions; with a card it may run ahead."""
        return self.recording.launch_s

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were on the device."""
        return max(one.high_bytes for walk in self.recording.walks for one in walk)

    @property
    def stall_s(self) -> dict[str, float]:
        """Seconds in which the executor waited, by what it waited for."""
        found: dict[str, float] = {}
        for wait in self.measured.waits:
            found[wait.cause] = found.get(wait.cause, 0.0) + wait.end_s - wait.start_s
        return found

    def explain(self) -> str:
        """Describe the measured iteration next to the predicted one."""
        pairs = [(self.measured.step_s, self.predicted.step_s), (self.measured.stall_s, self.predicted.stall_s)]
        step, stall = (f"{format_seconds(a)} measured, {format_seconds(b)} predicted" for a, b in pairs)
        peaks = [format_bytes(t.peak.total_bytes) for t in (self.measured, self.predicted)]
        waits = ", ".join(
            f"{format_seconds(s)} for {self.measured.title(Resource(cause))}"
            for cause, s in sorted(self.stall_s.items())
            if s > 0
        )
        return (
            f"one step: {step}\nof it waiting: {stall}{f' ({waits})' if waits else ''}\n"
            f"GPU peak: {peaks[0]} measured, {peaks[1]} predicted, budget {format_bytes(self.budget_bytes)}"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write predicted and measured side by side for Perfetto or chrome://tracing."""
        from ..reports.chrome_trace import save_trace

        save_trace([self.predicted, self.measured], path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page with the picture of both."""
        from ..reports.html import save_document

        timelines = [self.predicted, self.measured]
        save_document(timelines, self._title, self.explain().splitlines(), path, self.about.below_title())

    def plot_timeline(self, ax: Axes | None = None) -> Axes:
        """Draw what every resource did when, with matplotlib; on new axes if none are given."""
        from ..reports.plots import draw_timeline

        return draw_timeline(self.measured, ax)

    def plot_memory(self, ax: Axes | None = None) -> Axes:
        """Draw what was on the device, by kind, and over it the predicted curve, with matplotlib."""
        from ..reports.plots import draw_memory

        return draw_memory(self.measured, ax, beside=self.predicted)

    @property
    def _title(self) -> str:
        return self.about.title(f"one step in {format_bytes(self.budget_bytes)}, predicted and measured")

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        return f"<Trace: {format_seconds(self.step_s)} per step, {format_bytes(self.peak_bytes)} at most>"

    def _repr_html_(self) -> str:
        from ..reports.html import figure

        timelines = [self.predicted, self.measured]
        return figure(timelines, self._title, self.explain().splitlines(), self.about.below_title())
