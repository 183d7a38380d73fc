"""Figures of hardware files: numbers with the source that each of them is from."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection
from typing import Any

from ..errors import ArgumentValueError

LARGEST = 1e30
"""Of a figure, in any unit."""


def figure(
    data: dict[str, Any], key: str, where: str, least: float = 0.0, known: Collection[str] | None = None
) -> float:
    """Return a figure's value.

    Parameters
    ----------
    data: the object that has it. where: the file, and the place in it, for messages. least: the smallest value.
    known: keys that may stand there, so that a misspelt one is found; None if nothing else can.

    Raises: ArgumentValueError if it is missing, has no source, or is out of range.
    """
    entry = data.get(key)
    others = data.keys() - known if known is not None else ()
    if entry is None and (near := difflib.get_close_matches(key, others, n=1)):
        raise ArgumentValueError(f"{where}: there is no {key}, but {near[0]!r}, which is not known; is it misspelt?")
    if not isinstance(entry, dict) or "value" not in entry or not entry.get("source"):
        found = f"found {reprlib.repr(entry)}" if key in data else "and is missing"
        raise ArgumentValueError(f'{where}: {key} must be {{"value": number, "source": text}}, {found}')
    value = entry["value"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (least <= value <= LARGEST):
        words = "not negative" if least == 0 else f"{least:g} or more"
        raise ArgumentValueError(
            f"{where}: {key} is {str(value)[:40]}; it must be a number, {words} and at most {LARGEST:g}"
        )
    return float(value)


def with_source(value: float, source: str) -> dict[str, Any]:
    """Round a figure to four significant digits, since more would be noise, and add its source."""
    rounded = float(f"{value:.4g}")
    return {"value": int(rounded) if rounded >= 1e4 else rounded, "source": source}
