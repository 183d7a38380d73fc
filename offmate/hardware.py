"""Machines as JSON files: rates with their sources, so that a plan can be made for one that is not here."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1
FOLDER = Path(__file__).with_name("hardware")
_RATES = (
    "memory_bytes_per_s",
    "launch_s",
    "in_bytes_per_s",
    "out_bytes_per_s",
    "both_bytes_per_s",
    "cpu_update_bytes_per_s",
    "device_update_bytes_per_s",
)
_SIZES = ("device_bytes", "host_bytes")


class HardwareError(ValueError):
    """A hardware file that is unknown or cannot be read; the message names the nearest or what is wrong."""


@dataclass(frozen=True)
class Hardware:
    """A machine: every rate as it is reached in practice.

    Parameters
    ----------
    device_bytes, host_bytes: memory of the card and of the host.
    matrix_flops_per_s: of large products, by dtype name. memory_bytes_per_s: device memory traffic.
    launch_s: seconds that a kernel takes at least.
    in_bytes_per_s, out_bytes_per_s, both_bytes_per_s: of the link, each way alone and both together.
    cpu_update_bytes_per_s, device_update_bytes_per_s: bytes of parameters that Adam updates per second.
    manage_s: seconds of the host per step for everything else (H of the paper).
    sources: by figure where it is from.
    """

    name: str
    device_bytes: int
    host_bytes: int
    matrix_flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    launch_s: float
    in_bytes_per_s: float
    out_bytes_per_s: float
    both_bytes_per_s: float
    cpu_update_bytes_per_s: float
    device_update_bytes_per_s: float
    manage_s: float
    sources: dict[str, str]

    def seconds(self, flops: float, moved_bytes: float, dtype: str = "float32") -> float:
        """Seconds of an operator: the longest of its arithmetic, its memory traffic and its launch.

        Parameters
        ----------
        flops: its floating-point operations. moved_bytes: what it reads and writes. dtype: of its products.
        """
        rate = self.matrix_flops_per_s.get(dtype, self.matrix_flops_per_s["float32"])
        return max(flops / rate, moved_bytes / self.memory_bytes_per_s, self.launch_s)


def names() -> tuple[str, ...]:
    """The machines that come along."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load(name: str | Path) -> Hardware:
    """A machine by its name, or from a JSON file.

    Raises: HardwareError naming the nearest machine, or what the file lacks.
    """
    path = Path(name)
    if path.suffix != ".json":
        path = FOLDER / f"{str(name).lower().replace(' ', '').replace('_', '-')}.json"
    if not path.is_file():
        near = difflib.get_close_matches(path.stem, names(), 1, 0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise HardwareError(
            f"no hardware file {str(name)!r}{hint} There are {', '.join(names())}, or give a JSON file."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HardwareError(f"{path.name} is not JSON: {error}") from error
    return from_dict(data, path.name)


def from_dict(data: Any, place: str = "hardware") -> Hardware:
    """A machine from a hardware file's content: every figure as an object with `value` and `source`.

    Raises: HardwareError naming the figure that is missing or wrong.
    """
    if not isinstance(data, dict) or data.get("format") != "offmate-hardware" or data.get("version") != VERSION:
        raise HardwareError(f"{place}: not of format 'offmate-hardware', version {VERSION}")
    figures = data.get("figures", {})
    values = {name: _figure(figures, name, place) for name in (*_SIZES, *_RATES, "manage_s", "matrix_flops_per_s")}
    flops = values.pop("matrix_flops_per_s")
    if not isinstance(flops, dict) or "float32" not in flops:
        raise HardwareError(f"{place}: matrix_flops_per_s needs rates by dtype name, 'float32' among them")
    for key, value in {**values, **flops}.items():
        positive = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
        if not positive or (value == 0 and key not in ("launch_s", "manage_s")):
            raise HardwareError(f"{place}: {key} is {value!r}; it must be a positive number")
    sizes = {key: int(values.pop(key)) for key in _SIZES}
    sources = {key: str(figure["source"]) for key, figure in figures.items()}
    rates = {key: float(value) for key, value in values.items()}
    by_dtype = {key: float(value) for key, value in flops.items()}
    return Hardware(str(data.get("name", place)), **sizes, matrix_flops_per_s=by_dtype, **rates, sources=sources)


def _figure(figures: Any, name: str, place: str) -> Any:
    figure = figures.get(name) if isinstance(figures, dict) else None
    if not isinstance(figure, dict) or "value" not in figure or "source" not in figure:
        raise HardwareError(f"{place}: lacks the figure {name!r} with its 'value' and 'source'")
    return figure["value"]
