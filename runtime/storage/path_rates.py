"""The rates of a storage path as users give them."""

from __future__ import annotations

import functools
import logging

from ...errors import ArgumentValueError
from ...sizes import format_bytes, parse_rate

log = logging.getLogger("offmate")

_LEAST_BYTES_PER_S = 1 << 20
_SLACK = 1.1  # what is measured is not exact

Rate = float | str


def path_rates(
    folder: str, read: Rate | None, write: Rate | None, both: Rate | None
) -> tuple[float, float, float] | None:
    """Return the rates of reads, of writes and of both together, in bytes per second; None if none are given.

    A rate of both that no disk can have, beside the other two, is warned of once.

    Parameters
    ----------
    both: None for that of a disk on which reads and writes take turns.

    Raises: ArgumentTypeError, ArgumentValueError for what is no rate or too low, and for one of `read` and `write`
    alone.
    """
    rates = {"read": read, "write": write, "both": both}
    given = {name: rate for name, rate in rates.items() if rate is not None}
    found = {name: parse_rate(rate, name) for name, rate in given.items()}
    for name, rate in found.items():
        if rate < _LEAST_BYTES_PER_S:
            raise ArgumentValueError(
                f"{name}={given[name]!r} of {folder} is less than 1 MiB per second; if a unit is missing, write "
                f'{name}="3GB/s", or a number of bytes per second'
            )
    if not found:
        return None
    lacking = [name for name in ("read", "write") if name not in found]
    if lacking:
        named = ", ".join(f"{name}={rate!r}" for name, rate in given.items())
        raise ArgumentValueError(
            f"{folder} has {named} and no {' and no '.join(lacking)}; give read and write, or neither, so that they "
            "are measured"
        )
    reads, writes = found["read"], found["write"]
    together = found.get("both", in_turns(reads, writes))
    if together > _SLACK * (reads + writes) or together < min(reads, writes) / 2 / _SLACK:
        _warn(folder, reads, writes, together)
    return reads, writes, together


def in_turns(read: float, write: float) -> float:
    """Return the rate of both, in bytes per second, of a disk on which reads and writes take turns."""
    return 2 / (1 / read + 1 / write)


@functools.cache  # once
def _warn(folder: str, read: float, write: float, both: float) -> None:
    shown = [f"{format_bytes(int(rate))}/s" for rate in (read, write, both)]
    log.warning(
        "%s: reads alone at %s and writes alone at %s do not go with both together at %s, which should be between half "
        "the slower one and their sum. Plans count with it as it is; measure it (offmate profile --storage DIR)",
        folder, *shown,
    )  # fmt: skip
