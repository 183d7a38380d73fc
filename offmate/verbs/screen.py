"""What all verbs' screens share: the console, and pairs of a word and what is said about it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

NARROW = 76  # below so many columns a table's rows become lines


def console() -> Console:
    """Standard output: as wide as the terminal, or as COLUMNS says; 120 columns where there is neither."""
    # Without a terminal there is no width to ask for, and rich's 80 columns would fold the tables.
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(highlight=False, width=None if known else 120)


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """Words on the left, what is said about them on the right, folded to the width that there is."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for word, text in rows:
        grid.add_row(word, text)
    return grid
