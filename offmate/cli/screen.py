"""Screen output that all commands share: the console, and rows of a label and its text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..progress import hidden
from ..sizes import format_bytes

NARROW = 76  # below this width, in columns, a table's rows become lines


class Screen(Console):
    """A console that takes the moving line away while it prints."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does."""
        with hidden():
            super().print(*objects, **options)


def console(quiet: bool = False) -> Console:
    """Open a console on standard output, as wide as the terminal or COLUMNS says; 120 columns if neither is known.

    Parameters
    ----------
    quiet: print nothing.
    """
    # Without a terminal the width is unknown, and rich's 80 columns would fold the tables.
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Screen(highlight=False, width=None if known else 120, quiet=quiet)


def pairs(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Lay out labels on the left and their texts on the right, folded to the available width.

    Brackets are printed as they are; pass styled text as `Text`.
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for word, text in rows:
        grid.add_row(word, Text(text) if isinstance(text, str) else text)
    return grid


def copies_table(copies: Iterable[dict[str, Any]]) -> Table:
    """Tabulate copy rates, a row per size and a column per direction.

    Parameters
    ----------
    copies: rows of `offmate.machines.benchmark`: direction, bytes, bytes_per_s.
    """
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, title="Copies per second", title_justify="left", padding=(0, 1, 0, 0)
    )
    rows: dict[int, dict[str, float]] = {}
    for copy in copies:
        rows.setdefault(copy["bytes"], {})[copy["direction"]] = copy["bytes_per_s"]
    for heading in ("size", "in", "out", "both"):
        table.add_column(heading, justify="right", no_wrap=True)
    for size, rates in rows.items():
        cells = (format_bytes(int(rates[d])) if d in rates else "-" for d in ("in", "out", "both"))
        table.add_row(format_bytes(size), *cells)
    return table
