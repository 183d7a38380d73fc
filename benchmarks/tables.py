"""Rows of figures as a table on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def show(title: str, rows: Sequence[dict[str, Any]], digits: str = ".3f", width: int = 165) -> None:
    """Print rows that all have the same columns.

    Parameters
    ----------
    digits: format of fractional figures. width: of the screen, in characters.
    """
    if not rows:
        return
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{value:{digits}}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=width).print(table)
