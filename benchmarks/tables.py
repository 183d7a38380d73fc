"""Rows of figures as a table on the screen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .overhead import machine


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


def tell(title: str, found: Iterable[dict[str, Any]], json_file: Path | None, width: int) -> None:
    """Print each row as it is found, since one takes a while, then all as a table, and write them with the machine.

    Parameters
    ----------
    json_file: None writes nothing. width: of the screen, in characters.
    """
    rows = []
    for row in found:
        print(json.dumps(row), flush=True)
        rows.append(row)
    show(title, rows, ".3g", width=width)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
