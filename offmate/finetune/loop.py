"""The usual training loop, around a compiled model."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import DeviceError, OffmateError, StorageError
from ..session.linked_states import announce_checkpoints, make_room, session_of
from .checkpoint import EVALUATED, Moment, checkpoints, save_checkpoint, step_name
from .names import SETTINGS
from .packing import IGNORED, Batch, Batches, Packed, eval_batches
from .report import Reporter, StepRow, format_left, format_steps, host_bytes
from .samples import Prompts, write_samples
from .settings import Settings
from .state_folders import most_sets
from .updates import UpdateRule, learning_rate

log = logging.getLogger("offmate")

_SPEED_STEPS = 20  # over which the speed is averaged


@dataclass(frozen=True)
class TrainingRun:
    """The inputs of a training loop.

    Parameters
    ----------
    model: compiled, in training mode. start: number of steps already done. n_steps: number of steps of the whole run.
    checkpoints: folder of the checkpoints. tokenizer, prompts: of the samples.
    """

    settings: Settings
    model: Any
    updates: UpdateRule
    packed: Packed
    batches: Batches
    start: int
    n_steps: int
    checkpoints: Path
    reporters: list[Reporter]
    tokenizer: Any
    prompts: Prompts


def train(run: TrainingRun) -> None:
    """Train from `run.start` to `run.n_steps`, with a checkpoint at the end.

    Raises: OffmateError if the loss is not finite or a checkpoint cannot be written. KeyboardInterrupt after Ctrl-C or
    SIGTERM, once the step is done and its checkpoint is written.
    """
    settings = run.settings
    _tell(run, lambda r: r.start(run.start, run.n_steps))
    announce_checkpoints(session_of(run.model), most_sets(settings.keep_checkpoints))
    if run.start and _lacks_evaluation(run):
        _evaluate(run, run.start)
    clock = _Clock()
    steps = run.batches.steps(run.start)
    with _asked_to_stop(run) as asked, _told_how_to_go_on(run):
        for step in range(run.start, run.n_steps):
            row = _step(run, step, next(steps), clock)
            for reporter in run.reporters:
                reporter.step(row)
            done, last = step + 1, step + 1 == run.n_steps
            saves = last or done % settings.checkpoint_every == 0 or bool(asked)
            evaluates = done % settings.eval_every == 0 if settings.eval_every else saves
            if saves:
                _save(run, done, row.loss, goes_on=not last and not asked)
            # A run that ends complete has its last evaluation, even if it was asked to stop during its last step.
            if last or (evaluates and not asked):
                _evaluate(run, done)
                evaluates = True
            if asked and not saves:  # it was asked during the evaluation
                _save(run, done, row.loss, goes_on=False)
            if saves or evaluates:
                clock.forget()
            if asked and not last:
                raise KeyboardInterrupt(
                    f"stopped: {done:,} of {format_steps(run.n_steps)} done, about {format_left(row.left_s)} left. "
                    f"Continue with: {resuming(settings)}"
                )


def evaluate(model: Any, batches: Iterable[Batch]) -> float | None:
    """Compute the mean loss per predicted token of held-out text; None if there are no such tokens."""
    total, counted = 0.0, 0
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                predicted = int((batch["labels"][:, 1:] != IGNORED).sum())
                if predicted:
                    total += model(**batch).loss.item() * predicted
                    counted += predicted
    finally:
        model.train()
    return total / counted if counted else None


def _step(run: TrainingRun, step: int, micro_batches: list[Batch], clock: _Clock) -> StepRow:
    settings = run.settings
    rate = learning_rate(settings, step, run.n_steps)
    run.updates.set_learning_rate(rate)
    losses = []
    for batch in run.model.offmate.batches(micro_batches):
        loss = run.model(**batch).loss
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise OffmateError(_not_finite(run, step, losses[-1]))
        (loss / settings.micro_batches if settings.micro_batches > 1 else loss).backward()
    norm = run.updates.step()
    if norm is not None and not math.isfinite(norm):
        raise OffmateError(_not_finite(run, step, norm, "gradient norm"))
    tokens = run.batches.sequence_length * settings.batch_size * settings.micro_batches
    step_s = clock.tick()
    return StepRow(
        step=step + 1,
        loss=sum(losses) / len(losses),
        learning_rate=rate,
        gradient_norm=norm,
        tokens_per_s=tokens / step_s,
        left_s=step_s * (run.n_steps - step - 1),
        device_bytes=run.model.offmate.peak_bytes,
        host_bytes=host_bytes(),
    )


@contextmanager
def _told_how_to_go_on(run: TrainingRun) -> Iterator[None]:
    """Add to the error of a file or of the device that the run continues from its last checkpoint, if it has one."""
    try:
        yield
    except (StorageError, DeviceError) as error:
        if newest := _newest(run):
            error.add_note(f"The last checkpoint is {newest}. Continue from it with: {resuming(run.settings)}")
        raise


def _not_finite(run: TrainingRun, step: int, value: float, what: str = "loss") -> str:
    epoch = step // run.batches.steps_per_epoch
    newest = _newest(run)
    kept = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
    rate = learning_rate(run.settings, step, run.n_steps)
    return (
        f"the {what} of step {step + 1} (epoch {epoch + 1}, learning rate {rate:.3g}) is {value}; training stops, "
        f"{kept}. Try a lower learning_rate, more warmup_steps, or max_grad_norm"
    )


def _lacks_evaluation(run: TrainingRun) -> bool:
    """Return whether the run was killed after a checkpoint and before the evaluation that belongs to it."""
    settings, done = run.settings, run.start
    if done == run.n_steps:
        return True  # the result's card has its figures
    due = done % (settings.eval_every or settings.checkpoint_every) == 0
    return due and not (run.checkpoints / step_name(done) / EVALUATED).is_file()


def _newest(run: TrainingRun) -> Path | None:
    return next(iter(checkpoints(run.checkpoints)), None)


def resuming(settings: Settings) -> str:
    """Return the command that continues a run."""
    return f"offmate finetune --output {settings.output} --resume"


def _evaluate(run: TrainingRun, done: int) -> None:
    length, size = run.batches.sequence_length, run.settings.batch_size
    loss = evaluate(run.model, eval_batches(run.packed.eval, length, size))
    if loss is not None:
        _tell(run, lambda r: r.evaluation(done, loss))
    for sample in write_samples(run.model, run.tokenizer, run.prompts, run.settings.sample_tokens):
        for reporter in run.reporters:
            reporter.sample(done, sample)
    checkpoint = run.checkpoints / step_name(done)
    if checkpoint.is_dir():
        (checkpoint / EVALUATED).touch()


def _save(run: TrainingRun, done: int, loss: float, goes_on: bool) -> None:
    """Write a checkpoint, and report that it is on disk; if training `goes_on`, reserve what it writes next."""
    if not (run.checkpoints.parent / SETTINGS).is_file():
        raise OffmateError(f"{run.checkpoints.parent} was removed while the run trained, so it stops; begin it anew")
    handle, keep = run.model.offmate, run.settings.keep_checkpoints
    moment = Moment(done, run.packed.digest, torch.get_num_threads(), torch.__version__, handle.split, loss)
    storage = run.settings.storage
    path = save_checkpoint(run.checkpoints, moment, run.model, run.updates, handle.plan, keep, storage)
    _tell(run, lambda r: r.checkpoint(done, path))
    if goes_on:
        make_room(session_of(run.model))


def _tell(run: TrainingRun, what: Callable[[Reporter], None]) -> None:
    for reporter in run.reporters:
        what(reporter)


class _Clock:
    """Averages seconds per step over the last few; time outside training is left out."""

    def __init__(self) -> None:
        self._taken: list[float] = []
        self._last_s = time.perf_counter()

    def tick(self) -> float:
        now = time.perf_counter()
        self._taken = [*self._taken[-_SPEED_STEPS + 1 :], now - self._last_s]
        self._last_s = now
        # The first step copies everything to the device, so it is left out.
        steady = self._taken[1:] or self._taken
        return sum(steady) / len(steady)

    def forget(self) -> None:
        self._last_s = time.perf_counter()


@contextmanager
def _asked_to_stop(run: TrainingRun) -> Iterator[list[int]]:
    """Yield a list that fills when Ctrl-C or SIGTERM arrives; a second one interrupts at once."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: Any) -> None:
        if asked:
            newest = _newest(run)
            where = f"from {newest.name}" if newest else "from the beginning, as there is no checkpoint yet"
            raise KeyboardInterrupt(f"stopped at once. {resuming(run.settings)} continues {where}")
        asked.append(number)
        log.warning("stopping after this step and its checkpoint; interrupt again to stop at once")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
