"""Readable seconds and counts, and round numbers for axes."""

from __future__ import annotations

import math
import re

_SECONDS = re.compile(r"\b(\d[\d.]*(?:e-\d+)?) s\b")
_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def format_seconds(seconds: float) -> str:
    """Format seconds to three significant digits, such as "13.7 s" or "480 µs"."""
    magnitude = abs(seconds)
    if magnitude < 1e-9:
        return "0 s"
    unit, name = next(((u, n) for u, n in _SECOND_UNITS if magnitude >= u * 0.9995), _SECOND_UNITS[-1])
    scaled = seconds / unit
    digits = max(0, 2 - math.floor(math.log10(abs(scaled)) + 1e-9))
    return f"{scaled:.{min(digits, 2)}f} {name}"


def in_usual_units(text: str) -> str:
    """Write seconds below 1 in a smaller unit, such as 70.7 ms for 0.0707 s."""
    return _SECONDS.sub(lambda found: format_seconds(float(found[1])), text)


def ticks(end: float, about: int = 8) -> list[float]:
    """List about `about` round numbers from 0 to `end`: multiples of 1, 2 or 5 times a power of ten."""
    if end <= 0:
        return [0.0]
    rough = end / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [i * step for i in range(int(end / step + 1e-9) + 1)]


def second_ticks(end_s: float, about: int = 8) -> list[tuple[float, str]]:
    """List round seconds from 0 to `end_s` with their labels for an axis, all in one unit."""
    unit, name = next(((u, n) for u, n in _SECOND_UNITS if end_s >= u), _SECOND_UNITS[-1])
    return [(tick, f"{round(tick / unit, 6):g} {name}") for tick in ticks(end_s, about)]


def byte_ticks(end_bytes: float, about: int = 5) -> list[int]:
    """List round numbers of bytes from 0 to `end_bytes`: multiples of 1, 2 or 5 times a power of ten of a unit.

    The unit is the largest binary one that fits.
    """
    unit = 1024 ** int(math.log(max(end_bytes, 1), 1024))
    return [round(tick * unit) for tick in ticks(end_bytes / unit, about)]


def format_count(number: int) -> str:
    """Format a number in B, M or K to three digits: 6.74 B, 124 M, 125 K."""
    unit, name = next(((u, n) for u, n in ((10**9, "B"), (10**6, "M"), (10**3, "K")) if number >= u), (1, ""))
    return f"{number / unit:.3g} {name}".strip()
