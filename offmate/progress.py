"""Progress of planning on screen, where there is one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .planner import Progress as Say


@contextlib.contextmanager
def planning_progress() -> Iterator[Say]:
    """A progress bar on stderr with the phase of planning; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda phase, share: None
        return
    columns = (TextColumn("planning: {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda phase, share: bar.update(task, description=phase, completed=share)
