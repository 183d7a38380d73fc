"""The moving line on stderr, as rich draws it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_WIDEST_BAR = 40
_LEAST_BAR = 8


class Task(Protocol):
    """What takes its time: words for it, its phase, when it began, and the fraction that is done, if it is known."""

    words: str
    phase: str
    started_s: float

    def done(self) -> float | None:
        """Return the fraction that is done, from 0 to 1; None for what is not planning."""


class MovingLine:
    """A line with a spinner, what is done, a bar if it is planning, and the time since it began.

    Parameters
    ----------
    task: returns what is done now.
    """

    def __init__(self, task: Callable[[], Task]) -> None:
        self._task = task
        self._spinner = Spinner("dots")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the line, cut to the width of the terminal."""
        task = self._task()
        seconds = int(time.monotonic() - task.started_s)
        clock = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        words = f"{task.words}: {task.phase}" if task.phase else task.words
        grid = Table.grid(padding=(0, 1, 0, 0))
        cells: list[RenderableType] = [self._spinner, Text(words, overflow="ellipsis", no_wrap=True)]
        room = options.max_width - len(words) - len(clock) - 5
        done = task.done()
        if done is not None and room >= _LEAST_BAR:
            cells.append(ProgressBar(1.0, done, width=min(room, _WIDEST_BAR)))
        grid.add_column(width=1)
        grid.add_column(max_width=max(1, options.max_width - len(clock) - 4))
        grid.add_row(*cells, Text(clock, style="cyan", no_wrap=True))
        yield grid


def live(task: Callable[[], Task]) -> Live:
    """Return a display of the line, which its owner starts and stops."""
    # Where stdout is a file, what is printed belongs into it.
    both = sys.stdout.isatty()
    console = Console(stderr=True)
    return Live(MovingLine(task), console=console, transient=True, redirect_stdout=both, refresh_per_second=10)
