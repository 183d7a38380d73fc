"""Sizes in bytes: parsed from what users write, and formatted for reading."""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction

from .errors import ArgumentTypeError, ArgumentValueError

_EXAMPLES = '"12GiB", "12GB", "500 MiB", "1.5GiB" or a whole number of bytes'
_RATE_EXAMPLES = '"3GB/s", "500 MiB/s" or a number of bytes per second'
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([A-Za-z]*)")
_PREFIXES = "KMGTP"
_LEAST_BARE_BYTES = 1 << 20
_UNIT_BYTES = {"": 1, "B": 1}
_UNIT_BYTES |= {f"{prefix}B": 1000**power for power, prefix in enumerate(_PREFIXES, start=1)}
_UNIT_BYTES |= {f"{prefix}IB": 1024**power for power, prefix in enumerate(_PREFIXES, start=1)}


_DECIMAL = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))


def parse_bytes(value: int | str) -> int:
    """Parse a size into a number of bytes, rounding fractions of a byte down.

    Parameters
    ----------
    value: bytes as an integer, or text: a number and a unit, KiB MiB GiB TiB PiB (powers of 1024),
        kB MB GB TB PB (powers of 1000), B or none (bytes).

    Returns: bytes, at least 1.

    Raises: ArgumentTypeError for anything but an integer or text (a float is not a number of bytes), ArgumentValueError
    for text that is not a size, an unknown unit, bits (a lower-case b), and a size that is not positive.
    """
    if isinstance(value, str):
        return _positive(_parse_text(value), value)
    try:
        if isinstance(value, bool):
            raise TypeError
        size_bytes = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{value!r} is not a size: it is a {type(value).__name__}; write {_EXAMPLES}") from None
    return _positive(size_bytes, value)


def parse_budget(value: int | str, name: str = "") -> int:
    """Parse a budget: as `parse_bytes`, but a few bytes as text without a unit are a slip, such as "12" for 12 GiB.

    Parameters
    ----------
    name: of the argument, which an error then names.

    Raises: ArgumentTypeError, ArgumentValueError.
    """
    try:
        size_bytes = parse_bytes(value)
        if isinstance(value, str) and value.strip().isdecimal() and size_bytes < _LEAST_BARE_BYTES:
            number = value.strip()
            raise ArgumentValueError(
                f"{value!r} has no unit, and {number} bytes are too few; did you mean "
                f"{number}{'GiB' if size_bytes < 1024 else 'MiB'}? Write {_EXAMPLES}"
            )
    except (ArgumentTypeError, ArgumentValueError) as error:
        raise type(error)(f"{name}: {error}" if name else str(error)) from None
    return size_bytes


def parse_rate(value: float | str, name: str = "") -> float:
    """Parse a rate into bytes per second.

    Parameters
    ----------
    value: bytes per second as a number, or text: a size as `parse_bytes` takes it and "/s". name: of the argument,
        which an error then names.

    Raises: ArgumentTypeError for anything but a number or text, ArgumentValueError for text that is not a rate, and for
    a rate that is not positive and finite.
    """
    try:
        if isinstance(value, str):
            size, per, rest = value.partition("/")
            if not per or rest.strip() != "s":
                raise ArgumentValueError(f"{value!r} is not a rate; write {_RATE_EXAMPLES}")
            return float(_size_of_rate(size, value))
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(f"{value!r} is not a rate: it is a {type(value).__name__}; write {_RATE_EXAMPLES}")
        if not 0 < value < math.inf:
            raise ArgumentValueError(f"{value!r} is not a rate: it is not positive and finite; write {_RATE_EXAMPLES}")
        return float(value)
    except (ArgumentTypeError, ArgumentValueError) as error:
        raise type(error)(f"{name}: {error}" if name else str(error)) from None


def _size_of_rate(size: str, rate: str) -> int:
    try:
        return parse_bytes(size)
    except ArgumentValueError:
        why = " in bytes, but one in bits, because of its lower-case b" if size.strip().endswith("b") else ""
        if re.match(r"\s*(-|0*\.?0+\s*[A-Za-z]*$)", size):
            why = " above zero"
        raise ArgumentValueError(f"{rate!r} is not a rate{why}; write {_RATE_EXAMPLES}") from None


def format_bytes(size_bytes: int) -> str:
    """Format a size in binary units with three significant digits, such as "1.5 GiB", rounded to the nearest.

    Parameters
    ----------
    size_bytes: bytes; negative ones (differences) keep their sign.
    """
    magnitude = abs(size_bytes)
    unit, name = _binary_unit(magnitude)
    digits = _decimals(magnitude, unit)
    # Rounding may reach the next unit: 1023.99 MiB is 1 GiB.
    if unit > 1 and name != "PiB" and round(magnitude / unit, digits) >= 1024:
        unit, name = _binary_unit(unit * 1024)
        digits = 2
    text = f"{magnitude / unit:.{digits}f}"
    return f"{'-' if size_bytes < 0 else ''}{_without_zeros(text)} {name}"


def format_wear(size_bytes: int) -> str:
    """Format bytes written to a drive as drives are rated: in decimal units with three significant digits."""
    amount, unit = next(
        (size_bytes / size, unit) for size, unit in _DECIMAL if size_bytes >= 0.1 * size or unit == "MB"
    )
    return f"{amount:,.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"


def format_least_bytes(size_bytes: int) -> str:
    """Format a size in binary units, rounded up, so that the printed size suffices when typed as a budget.

    Parameters
    ----------
    size_bytes: bytes, not negative.
    """
    unit, name = _binary_unit(size_bytes)
    digits = _decimals(size_bytes, unit)
    scaled = math.ceil(Fraction(size_bytes, unit) * 10**digits)
    return f"{_without_zeros(f'{scaled / 10**digits:.{digits}f}')} {name}"


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentValueError(f"{text!r} is not a size; write {_EXAMPLES}")
    number, unit = match.groups()
    if unit.endswith("b"):
        raise ArgumentValueError(
            f"{text!r} is a size in bits, because of its lower-case b; write a capital B: {_EXAMPLES}"
        )
    if unit.upper() not in _UNIT_BYTES:
        raise ArgumentValueError(f"{text!r} has the unknown unit {unit!r}; write {_EXAMPLES}")
    return int(Fraction(number) * _UNIT_BYTES[unit.upper()])


def _positive(size_bytes: int, value: int | str) -> int:
    if size_bytes <= 0:
        raise ArgumentValueError(f"{value!r} is not a size: it is less than one byte; write {_EXAMPLES}")
    return size_bytes


def _binary_unit(size_bytes: int) -> tuple[int, str]:
    """Return the largest binary unit that the size reaches, in bytes, and its name."""
    for power in range(len(_PREFIXES), 0, -1):
        if size_bytes >= 1024**power:
            return 1024**power, f"{_PREFIXES[power - 1]}iB"
    return 1, "B"


def _decimals(size_bytes: int, unit_bytes: int) -> int:
    """Return the number of decimals that gives three significant digits; whole bytes have none."""
    if unit_bytes == 1:
        return 0
    whole_digits = len(str(size_bytes // unit_bytes))
    return max(0, 3 - whole_digits)


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
