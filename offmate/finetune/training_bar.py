"""The line at the bottom of a terminal while a run trains: as many of its figures as fit beside each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..progress import shown_by

_GAP = 2
_LEAST_BAR, _WIDEST_BAR = 8, 40
_BESIDE_BAR = 3  # figures that are worth more than the bar: step, loss, time left


class TrainingBar:
    """A bar and figures of a run on one line.

    State: the step, its figures, and what is being planned now.

    Parameters
    ----------
    step: steps that are done. n_steps: of the whole run.
    """

    def __init__(self, step: int, n_steps: int) -> None:
        self._step, self._n_steps = step, n_steps
        self._figures: tuple[str, ...] = ()
        self._phase = "planning the first step"

    def update(self, step: int, figures: Sequence[str]) -> None:
        """Show the figures of a step, the most important first."""
        self._step, self._figures, self._phase = step, tuple(figures), ""

    @contextlib.contextmanager
    def shown(self, console: Console) -> Iterator[None]:
        """Keep the line at the bottom of a terminal inside the `with` block; it also shows plans that are made then."""
        with shown_by(self._plans), Live(self, console=console, refresh_per_second=4):
            yield

    def _plans(self, phase: str, share: float) -> None:
        self._phase = f"planning: {phase}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        step = f"step {self._step:,}/{self._n_steps:,}"
        texts = fitting([step, *([self._phase] if self._phase else self._figures)], width)
        left = width - sum(len(text) + _GAP for text in texts)
        grid = Table.grid(padding=(0, _GAP, 0, 0))
        cells: list[ProgressBar | Text] = [Text(text, overflow="ellipsis", no_wrap=True) for text in texts]
        if left >= _LEAST_BAR:
            bar = ProgressBar(self._n_steps, self._step, width=min(left, _WIDEST_BAR))
            cells.insert(0, bar)
        grid.add_row(*cells)
        yield grid


def fitting(texts: Sequence[str], width: int, bar: bool = True) -> list[str]:
    """Return the first texts that fit on a line beside each other; from the fourth on, only if a bar still fits too.

    Parameters
    ----------
    texts: the most important first. width: in columns. bar: whether a bar stands on the line.
    """
    kept: list[str] = []
    used = -_GAP
    for text in texts:
        used += len(text) + _GAP
        needed = used + (_LEAST_BAR + _GAP if bar and len(kept) >= _BESIDE_BAR else 0)
        if kept and needed > width:
            break
        kept.append(text)
    return kept
