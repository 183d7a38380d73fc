"""Progress bars of planning, shown where stderr is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from .libraries import library_errors

Progress = Callable[[str, float], None]
"""A callback that takes the phase of planning and the fraction of it that is done, from 0 to 1."""

_quiet: list[bool] = []


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Suppress progress bars inside the `with` block, if wanted."""
    _quiet.extend([True] * wanted)
    try:
        yield
    finally:
        del _quiet[len(_quiet) - wanted :]


@contextlib.contextmanager
def planning_progress(what: str = "planning") -> Iterator[Progress]:
    """Show a progress bar of planning, or of `what`, on stderr; none inside `quiet` or if stderr is not a terminal."""
    if _quiet or not sys.stderr.isatty():
        yield lambda phase, share: None
        return
    with library_errors():
        import rich.progress
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn(f"{what}: {{task.description}}"), BarColumn(), TimeElapsedColumn())
    with rich.progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda phase, share: bar.update(task, description=phase, completed=share)
