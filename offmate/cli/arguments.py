"""Arguments that several verbs read; nothing heavy is loaded."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..sizes import parse_bytes

_MOST_POINTS = 64


class Help(argparse.HelpFormatter):
    """Folds descriptions to the terminal's width, and leaves examples, which have lines of their own, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def size(text: str) -> int:
    """Bytes as people write them."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def device(text: str) -> str:
    """A device's name as torch writes it; whether there is such a one is seen when torch is loaded."""
    if not re.fullmatch(r"[a-z]+(:[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f'{text!r} is not a device, such as "cuda", "cuda:1" or "emulated"')
    return text


def output_file(text: str) -> Path:
    """Refuses a file that cannot be written before the run, not minutes later; leaves none behind."""
    path = Path(text)
    new = not path.exists()
    try:
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return path


def sweep(text: str) -> tuple[int, ...]:
    """LOW:HIGH:STEP as the budgets from LOW to HIGH, in bytes."""
    parts = text.split(":")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH:STEP, such as 6GiB:24GiB:2GiB")
    low, high, step = map(size, parts)
    if low > high:
        raise argparse.ArgumentTypeError(f"{text!r} starts above its end; write the smaller budget first")
    if (high - low) // step >= _MOST_POINTS:
        raise argparse.ArgumentTypeError(f"{text!r} has more than {_MOST_POINTS} budgets; take a larger step")
    return tuple(range(low, high + 1, step))
