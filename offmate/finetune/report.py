"""Progress reports of a run: on a terminal, as JSON lines, to TensorBoard and to wandb."""

from __future__ import annotations

import contextlib
import html
import json
import resource
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.text import Text

from ..libraries import check_installed
from ..sizes import format_bytes
from .samples import Sample
from .training_bar import TrainingBar, fitting

_LINES_EVERY_S = {False: 5.0, True: 60.0}  # without and with a terminal, on which a line is always current
_LINES = 10  # at the least, of a run that is over sooner


@dataclass(frozen=True)
class StepRow:
    """One step of training.

    Parameters
    ----------
    step: counted from 1. gradient_norm: before clipping; None if nothing measured it.
    left_s: estimated seconds to the end. device_bytes: peak so far. host_bytes: own memory of this process now.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    tokens_per_s: float
    left_s: float
    device_bytes: int
    host_bytes: int


class Reporter(Protocol):
    """A receiver of a run's progress."""

    def start(self, step: int, n_steps: int) -> None:
        """Report that training begins after `step` steps of `n_steps`."""

    def step(self, row: StepRow) -> None:
        """Report that a step is done."""

    def evaluation(self, step: int, loss: float) -> None:
        """Report the held-out loss after a step."""

    def sample(self, step: int, sample: Sample) -> None:
        """Report what the model wrote after a prompt."""

    def checkpoint(self, step: int, path: Path) -> None:
        """Report that a checkpoint is on disk."""

    def close(self) -> None:
        """Report that the run has ended, successfully or not."""


def make_reporters(names: tuple[str, ...], output: Path, settings: dict[str, Any], mode: str) -> list[Reporter]:
    """Make the reporters of a run.

    Parameters
    ----------
    mode: "normal", "quiet" (nothing but errors) or "json" (lines on stdout).

    Raises: LibraryError if a library is not installed.
    """
    shown: list[Reporter] = []
    if mode == "json":
        shown.append(JsonReporter(sys.stdout))
    elif mode == "normal":
        shown.append(ConsoleReporter(Console(highlight=False, width=None if sys.stdout.isatty() else 120)))
    makers: dict[str, Callable[[Path, dict[str, Any]], Reporter]] = {
        "tensorboard": tensorboard_reporter,
        "wandb": wandb_reporter,
    }
    check_reporters(names)
    return shown + [makers[name](output, settings) for name in names]


def check_reporters(names: tuple[str, ...]) -> None:
    """Raise LibraryError if a reporter's library is not installed."""
    for name in names:
        check_installed(name)


class ConsoleReporter:
    """A reporter that prints a line every few seconds or steps; on a terminal, a bar stands below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = contextlib.ExitStack()
        self._bar: TrainingBar | None = None
        self._n_steps = 0
        self._last: StepRow | None = None
        self._last_line_s = 0.0

    def start(self, step: int, n_steps: int) -> None:
        self._n_steps = n_steps
        if self._console.is_terminal:
            self._bar = TrainingBar(step, n_steps)
            self._open.enter_context(self._bar.shown(self._console))

    def step(self, row: StepRow) -> None:
        first, self._last = self._last is None, row
        if self._bar is not None:
            self._bar.update(row.step, _figures(row))
        now, every = time.monotonic(), -(-self._n_steps // _LINES)
        late = now - self._last_line_s >= _LINES_EVERY_S[self._bar is not None]
        if first or late or row.step % every == 0 or row.step == self._n_steps:
            self._line(row)
            self._last_line_s = now

    def evaluation(self, step: int, loss: float) -> None:
        trained = f", loss of this step {self._last.loss:.4f}" if self._last is not None else ""
        self._console.print(f"step {step:,}/{self._n_steps:,}: held-out loss {loss:.4f}{trained}")

    def sample(self, step: int, sample: Sample) -> None:
        words = Text(f"step {step:,}/{self._n_steps:,}: after {sample.prompt!r} the model writes\n")
        self._console.print(words + Text(textwrap.indent(sample.text, "  ")))

    def checkpoint(self, step: int, path: Path) -> None:
        self._console.print(f"step {step:,}/{self._n_steps:,}: checkpoint {path}", soft_wrap=True)

    def close(self) -> None:
        self._open.close()

    def _line(self, row: StepRow) -> None:
        """Print the figures of a step: in a file all of them, on a terminal those that fit on a line."""
        begin = f"step {row.step:,}/{self._n_steps:,}:"
        if self._bar is None:
            self._console.print(f"{begin} {', '.join(_figures(row))}{_until(row)}", soft_wrap=True)
            return
        figures = fitting(_figures(row), self._console.width - len(begin) - 1, bar=False)
        self._console.print(f"{begin} {', '.join(figures)}")


class JsonReporter:
    """A reporter that prints one JSON object per line, each with its "event"."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, step: int, n_steps: int) -> None:
        self._say(event="start", step=step, steps=n_steps)

    def step(self, row: StepRow) -> None:
        self._say(event="step", **asdict(row))

    def evaluation(self, step: int, loss: float) -> None:
        self._say(event="evaluation", step=step, loss=loss)

    def sample(self, step: int, sample: Sample) -> None:
        self._say(event="sample", step=step, **asdict(sample))

    def checkpoint(self, step: int, path: Path) -> None:
        self._say(event="checkpoint", step=step, path=str(path))

    def close(self) -> None:
        self._stream.flush()

    def _say(self, **what: Any) -> None:
        print(json.dumps(what), file=self._stream, flush=True)


class ScalarReporter:
    """A reporter of named numbers and texts per step, for services that draw curves.

    Parameters
    ----------
    log: called with numbers by name, and their step. write: called with a name, a text and its step.
    close: ends the service's run.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float], int], None],
        write: Callable[[str, str, int], None],
        close: Callable[[], None],
    ) -> None:
        self._log, self._write, self._close = log, write, close

    def start(self, step: int, n_steps: int) -> None:
        """Do nothing: there is no number to report."""

    def step(self, row: StepRow) -> None:
        numbers = {f"train/{k}": v for k, v in asdict(row).items() if k != "step" and v is not None}
        self._log(numbers, row.step)

    def evaluation(self, step: int, loss: float) -> None:
        self._log({"eval/loss": loss}, step)

    def sample(self, step: int, sample: Sample) -> None:
        self._write(f"sample/{sample.prompt}", sample.text, step)

    def checkpoint(self, step: int, path: Path) -> None:
        """Do nothing: there is no number to draw."""

    def close(self) -> None:
        self._close()


def tensorboard_reporter(output: Path, settings: dict[str, Any]) -> ScalarReporter:
    """Make a reporter that writes TensorBoard's event files below the output folder."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(output / "tensorboard"))

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return ScalarReporter(log, writer.add_text, writer.close)


def wandb_reporter(output: Path, settings: dict[str, Any]) -> ScalarReporter:
    """Make a reporter to a wandb run, whose project and mode come from wandb's environment variables."""
    import wandb

    run = wandb.init(dir=str(output), config=settings, name=output.name)

    def write(name: str, text: str, step: int) -> None:
        run.log({name: wandb.Html(html.escape(text))}, step=step)

    return ScalarReporter(lambda numbers, step: run.log(numbers, step=step), write, run.finish)


def host_bytes() -> int:
    """Return this process's own memory now, or its peak if the system does not tell.

    Pages of mapped files, such as those of a base that stays in its files, do not count: the system drops them at will.
    """
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return sum(int(rows[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    except (OSError, LookupError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def format_left(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def format_steps(number: int, word: str = "step") -> str:
    """Format a number of steps, such as "1 step" or "1,200 steps"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _figures(row: StepRow) -> list[str]:
    """Write the figures of a step, the most important first."""
    norm = [] if row.gradient_norm is None else [f"norm {row.gradient_norm:.2g}"]
    return [
        f"loss {row.loss:.4f}",
        f"{format_left(row.left_s)} left",
        f"{row.tokens_per_s:,.0f} tokens/s",
        f"GPU {format_bytes(row.device_bytes)}",
        f"CPU {format_bytes(row.host_bytes)}",
        f"lr {row.learning_rate:.3g}",
        *norm,
    ]


def _until(row: StepRow) -> str:
    form = "%H:%M" if row.left_s < 12 * 3600 else "%a %H:%M"
    return f", until {time.strftime(form, time.localtime(time.time() + row.left_s))}"
