"""Checks of single values, each of which names the value and what it may be."""

from __future__ import annotations

import math
import reprlib
import sys
from typing import Any

from ..errors import ArgumentValueError
from ..sizes import parse_budget

NONE = "none"  # how a user turns something off
MOST = 10**12  # beyond it, a number is a slip: torch could not hold the tensors, or the seed of an epoch's order


def check_whole(name: str, value: Any, least: int, most: int = MOST) -> None:
    """Raise ArgumentValueError unless a value is a whole number of the range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        upper = f" and at most {most:,}" if isinstance(value, int) and value > most else ""
        raise ArgumentValueError(f"{name} is {short(value)}; it must be a whole number of at least {least}{upper}")


def check_number(name: str, value: Any, least: float, *, above: bool = False, below: float = math.inf) -> None:
    """Raise ArgumentValueError unless a value is a finite number of the range, which begins above `least` if asked."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not good or value < least or (above and value <= least) or value >= below:
        upper = f" and less than {below:g}" if math.isfinite(below) else ", and finite"
        raise ArgumentValueError(
            f"{name} is {short(value)}; it must be {'more than' if above else 'at least'} {least:g}{upper}"
        )


def is_text(value: str) -> bool:
    """Return whether a text can be written as UTF-8; half a character, as undecodable arguments have, cannot."""
    return value == value.encode("utf-8", "ignore").decode("utf-8")


def check_name(name: str, value: str) -> None:
    """Raise ArgumentValueError unless a text can be the name of a file here."""
    if "\0" in value or not is_text(value):
        raise ArgumentValueError(
            f"{name} is {short(value)}; a null byte, or one that is not UTF-8, cannot be part of a name here"
        )


def short(value: Any) -> str:
    """Return a value as it is written, cut to a few words."""
    return reprlib.repr(value)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ArgumentValueError unless a value is one of the choices."""
    if value not in choices:
        raise ArgumentValueError(f"{name} is {short(value)}; it must be one of {', '.join(choices)}")


def check_size(name: str, value: str) -> None:
    """Raise ArgumentValueError unless a text is a size in bytes, or "auto"."""
    if value == "auto":
        return
    try:
        parse_budget(value)
    except (TypeError, ValueError) as error:
        raise ArgumentValueError(f"{name}: {error}") from None


def as_float(value: Any) -> Any:
    """Return text that is a number as one, since YAML 1.1 reads 2e-5 as text; anything else stays as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
