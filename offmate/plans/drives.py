"""What a plan reads from storage paths and writes to them, in words: bytes, the part of a step, and wear."""

from __future__ import annotations

from collections.abc import Sequence

from ..lowering.state_files import StatePath
from ..sizes import format_bytes, format_wear
from ..solver.items import parameter
from ..solver.resources import Path
from ..solver.schedule import Schedule

_RATED = 600  # times its capacity may a consumer drive be written, by the usual ratings of data sheets
_USUAL_BYTES = 2 * 10**12
_STEPS = 1000
RATED_WORDS = (
    f"a consumer drive of {format_wear(_USUAL_BYTES)} is usually rated for {format_wear(_RATED * _USUAL_BYTES)}"
)
"""A drive's usual rating: an assumption, to compare with what is written."""


def stored_words(moved: tuple[int, int], path: Path, step_s: float, what: str = "optimizer states") -> str:
    """Say how much is read and written on all storage paths per step, how long that takes, and how it wears drives.

    Parameters
    ----------
    moved: bytes that are read and written per step. path: the links to the storage paths together. what: moves.
    """
    read, written = moved
    rates = path.in_bytes_per_s, path.out_bytes_per_s, path.alike_bytes_per_s
    return (
        f"{format_bytes(read)} of {what} are read from the storage paths per step, and "
        f"{format_bytes(written)} written: {_busy(moved, rates, step_s)} of the step. {_STEPS:,} steps write "
        f"{format_wear(_STEPS * written)}; {RATED_WORDS}"
    )


def in_files(schedule: Schedule) -> str:
    """Name the kinds of what a schedule keeps in files on storage paths."""
    kinds = {
        "optimizer states": schedule.states_in_files,
        "parameters": schedule.trained_homes | schedule.cast_parameters,
        "activations": schedule.values_in_files,
    }
    *more, last = (words for words, there in kinds.items() if there) if any(kinds.values()) else ("optimizer states",)
    return f"{', '.join(more)} and {last}" if more else last


def cast_words(schedule: Schedule) -> list[str]:
    """Say how much RAM parameters do not take that are cast from their float32 copies; nothing if none are."""
    spared = sum(schedule.item_bytes[parameter(name)] for name in schedule.cast_parameters)
    if not spared:
        return []
    return [
        f"{format_bytes(spared)} of parameters take no RAM: for each copy to the GPU, they are cast from the float32 "
        "copies that the optimizer keeps there, and they are written to the storage paths when somebody reads them"
    ]


def path_words(moved: tuple[int, int], paths: Sequence[StatePath], step_s: float) -> list[str]:
    """Say the same of each of several storage paths; an empty list for one alone, of which all has been said.

    Parameters
    ----------
    moved: bytes that are read and written per step on all of them.
    """
    if len(paths) < 2:
        return []
    lines = []
    for path in paths:
        own = (round(path.share * moved[0]), round(path.share * moved[1]))
        rates = path.read_bytes_per_s, path.write_bytes_per_s, path.both_bytes_per_s
        lines.append(
            f"{path.folder}: {format_bytes(own[0])} read and {format_bytes(own[1])} written per step, "
            f"{_busy(own, rates, step_s)} of the step; {_STEPS:,} steps write {format_wear(_STEPS * own[1])} there"
        )
    return lines


def _busy(moved: tuple[int, int], rates: tuple[float, float, float], step_s: float) -> str:
    read, written = moved
    own_s = max(read / rates[0], written / rates[1], (read + written) / rates[2])
    return f"{round(100 * min(own_s / step_s if step_s else 0.0, 1.0))} %"
