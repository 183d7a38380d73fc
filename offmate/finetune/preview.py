"""A forecast of a run in five lines, and warnings about what looks wrong."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ..errors import OffmateError
from ..machines.host_memory import available_host_bytes
from ..plans.plan import Plan
from ..sizes import format_bytes, format_least_bytes
from .packing import Batches, Packed
from .report import format_left
from .settings import Settings

_SLOW, _SLOW_S = 5.0, 1.0  # multiple of the compute; steps of fewer seconds are never called slow
_LONG_S = 7 * 24 * 3600


@dataclass(frozen=True)
class Preview:
    """A forecast of what a run will take.

    Parameters
    ----------
    n_steps: number of steps of the whole run. done: steps that an earlier run has done.
    weights_bytes, states_bytes: sizes of a checkpoint's weights and states on disk.
    """

    settings: Settings
    plan: Plan
    packed: Packed
    batches: Batches
    n_steps: int
    done: int
    weights_bytes: int
    states_bytes: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one update sees."""
        return self.batches.sequence_length * self.settings.batch_size * self.settings.accumulation

    @property
    def step_s(self) -> float:
        """Predicted seconds of one update."""
        return self.plan.predicted_step_s

    @property
    def left_s(self) -> float:
        """Predicted seconds to the end."""
        return self.step_s * (self.n_steps - self.done)

    @property
    def host_bytes(self) -> int:
        """Predicted host memory of tensors."""
        return self.plan.host_bytes

    @property
    def disk_bytes(self) -> int:
        """The most disk that checkpoints and the result take: a new checkpoint is written before an old one goes."""
        one = self.weights_bytes + self.states_bytes
        return one * (self.settings.keep_checkpoints + 1) + self.weights_bytes

    def lines(self) -> list[str]:
        """Write five lines: whether it fits, how fast it is, host memory, how much data, how long it takes."""
        plan, settings = self.plan, self.settings
        sequences = f"{self.batches.n_sequences:,} sequences of {self.batches.sequence_length} tokens"
        held_out = f"{len(self.packed.eval):,} tokens held out"
        return [
            f"fits: GPU memory peak {format_bytes(plan.predicted_peak_bytes)} of {format_bytes(plan.budget_bytes)}; "
            f"the least budget that works is {format_least_bytes(plan.least_budget_bytes)}",
            f"speed: {self.step_s:.3g} s per step predicted, {self.tokens_per_step / self.step_s:,.0f} tokens/s",
            f"CPU memory: {format_bytes(self.host_bytes)} of tensors; {format_bytes(self.disk_bytes)} of disk for "
            f"{settings.keep_checkpoints} checkpoints and the result",
            f"data: {sequences}, {self.batches.steps_per_epoch:,} steps per epoch; {held_out}; training on "
            + ("only the assistant's tokens of chats" if settings.assistant_only else "all tokens"),
            f"end: after {self.n_steps:,} steps"
            + (f", of which {self.done:,} are done" if self.done else "")
            + f"; {format_left(self.left_s)} from now",
        ]

    def doubts(self) -> list[str]:
        """List what looks wrong, a sentence each; empty if nothing does."""
        settings, found = self.settings, []
        schedule = self.plan.schedule
        compute_s = schedule.micro_batches * sum(c.seconds for c in schedule.computes.values())
        if self.plan.predicted_step_s > max(_SLOW * compute_s, _SLOW_S):
            found.append(
                f"a step takes {self.plan.predicted_step_s / compute_s:.1f} times as long as its compute, so data "
                "movement limits it; a larger gpu_budget or batch_size helps"
            )
        if self.left_s > _LONG_S:
            found.append(f"the run takes {self.left_s / 86400:.0f} days; try fewer steps or a shorter sequence_length")
        if settings.warmup_steps >= self.n_steps:
            found.append(f"warmup_steps is {settings.warmup_steps} of {self.n_steps} steps, so the warm-up never ends")
        if settings.eval_fraction > 0 and len(self.packed.eval) < 2:
            found.append("no document is held out, so nothing is evaluated; raise eval_fraction, or set it to 0")
        available = available_host_bytes()
        if self.host_bytes > available:
            found.append(
                f"the run needs {format_bytes(self.host_bytes)} of CPU memory, but {format_bytes(available)} are free"
            )
        return found


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise OffmateError if a folder's disk has less room than is needed."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise OffmateError(
            f"{folder}: checkpoints and the result need up to {format_bytes(needed_bytes)}, but the disk has "
            f"{format_bytes(free)} free; keep fewer (keep_checkpoints), or write elsewhere"
        )
