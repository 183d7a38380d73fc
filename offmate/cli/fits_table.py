"""The table of `offmate fits`, printed row by row as rows are found."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..libraries import missing
from ..reports.units import format_seconds
from ..sizes import format_bytes, format_least_bytes, format_wear

if TYPE_CHECKING:
    from rich.console import Console

    from ..machines.hardware import Hardware

_MODEL, _WAY, _STEP, _RATE, _LEAST, _PEAK, _RAM = 15, 11, 8, 9, 10, 10, 10
_WIDE = _MODEL + _WAY + _STEP + _RATE + _LEAST + _PEAK + _RAM + 6  # columns of the screen


@dataclass(frozen=True)
class Row:
    """One way to train one model.

    Parameters
    ----------
    seq_len: tokens per sequence. step_s, tokens_per_s: predicted; None if it does not fit.
    device_bytes: at most on the GPU within the card's budget.
    least_device_bytes: the least GPU budget that works with the RAM. host_bytes: RAM that the rough plan uses.
    least_host_bytes: about the least RAM with which it fits on the card, if it is more than there is.
    refused: why nothing is known.
    """

    model: str
    way: str
    seq_len: int
    step_s: float | None = None
    tokens_per_s: float | None = None
    device_bytes: int | None = None
    least_device_bytes: int | None = None
    host_bytes: int | None = None
    least_host_bytes: int | None = None
    refused: str = ""


class FitsTable:
    """Rows on a screen.

    State: the last model's name, which models take no sequences of that length, and whether a row lacks RAM.

    Parameters
    ----------
    arguments: those of `offmate fits`. machine: the card.
    """

    def __init__(self, screen: Console, arguments: argparse.Namespace, machine: Hardware) -> None:
        self._screen, self._arguments, self._machine = screen, arguments, machine
        self._model = ""
        self._shorter: list[str] = []
        self._short_of_ram = False

    def begin(self, n_models: int, seconds: float, adapters: bool) -> None:
        """Print what is asked, how long the answer takes, and the headings."""
        asked = self._arguments
        ram = "any amount" if asked.cpu_budget is None else format_bytes(asked.cpu_budget)
        self._say(
            f"{self._machine.name}, {format_bytes(asked.gpu_budget)} of GPU memory, {ram} of RAM, "
            f"{asked.batch} × {asked.seq_len} tokens, AdamW{self._drives()}"
        )
        if slow := self._machine.rate_words("bfloat16"):
            self._say(f"{slow}.")
        if not adapters:
            self._say(f"LoRA is left out: {missing('peft')}")
        if seconds:
            minutes, plural = max(1, round(seconds / 60)), "s" * (n_models > 1)
            self._say(
                f"{n_models} model{plural}: about {minutes} min on two idle cores for what is not known yet; rows come "
                "as they are found, and are kept"
            )
        self._screen.print()
        if self._screen.width >= _WIDE:
            headings = (
                "model".ljust(_MODEL), "way".ljust(_WAY), "s/step".rjust(_STEP), "tokens/s".rjust(_RATE),
                "least GPU".rjust(_LEAST), "GPU peak".rjust(_PEAK), "RAM".rjust(_RAM),
            )  # fmt: skip
            self._screen.print(" ".join(headings), style="bold")

    def add(self, row: Row) -> None:
        """Print a row; the model's name comes once."""
        from rich.text import Text

        new, self._model = row.model != self._model, row.model
        if new and row.seq_len < self._arguments.seq_len:
            self._shorter.append(f"{row.model} at {row.seq_len:,}")
        lacks = self._lacks(row)
        self._short_of_ram |= row.least_host_bytes is not None
        if self._screen.width < _WIDE:
            self._add_lines(row, new, lacks)
            return
        name = row.model if new else ""
        start = f"{name.ljust(_MODEL)} {row.way.ljust(_WAY)} "
        if lacks:
            room = self._screen.width - len(start)
            self._screen.print(Text.assemble(start, (_cut(lacks, room), "yellow")))
            return
        assert row.step_s is not None and row.tokens_per_s is not None
        cells = (
            f"{row.step_s:.3g}".rjust(_STEP), f"{row.tokens_per_s:,.0f}".rjust(_RATE),
            _size(row.least_device_bytes, up=True).rjust(_LEAST), _size(row.device_bytes).rjust(_PEAK),
            _size(row.host_bytes, up=True).rjust(_RAM),
        )  # fmt: skip
        self._screen.print(start + " ".join(cells), markup=False)

    def end(self) -> None:
        """Print what the figures are."""
        self._screen.print()
        if self._shorter:
            self._say(f"Fewer tokens per sequence, as these models take no more: {', '.join(self._shorter)}.")
        if self._short_of_ram and not isinstance(self._arguments.storage, tuple):
            self._say("Where RAM is short, --storage 7GB/s,5GB/s lets optimizer states lie on an NVMe drive.")
        self._screen.print(
            "Predicted from the card's rates, with few of the planner's passes; `offmate plan` finds plans that are a "
            "few percent faster. least GPU: the least GPU memory that works, more slowly. RAM: what the plan uses; "
            "with less, there may be a slower one.",
            style="dim",
        )

    def _drives(self) -> str:
        """Say which drives there are; empty without any."""
        storage = self._arguments.storage
        if storage is None:
            return ""
        if isinstance(storage, float):
            return f", a drive that reads {format_wear(int(storage))}/s"
        return "".join(
            f", {path.folder} ({format_wear(int(path.rates[0]))}/s read, {format_wear(int(path.rates[1]))}/s written)"
            for path in storage
        )

    def _add_lines(self, row: Row, new: bool, lacks: str) -> None:
        from rich.text import Text

        if new:
            self._screen.print(row.model, style="bold", markup=False)
        if lacks:
            self._screen.print(Text.assemble(f"  {row.way}: ", (lacks, "yellow")))
            return
        assert row.step_s is not None and row.tokens_per_s is not None
        self._say(
            f"  {row.way}: {format_seconds(row.step_s)}, {row.tokens_per_s:,.0f} tokens/s, "
            f"{_size(row.device_bytes)} GPU, {_size(row.host_bytes, up=True)} RAM"
        )

    def _lacks(self, row: Row) -> str:
        """Say what a row lacks; empty if it fits."""
        if row.refused:
            return f"refused: {row.refused}"
        if row.step_s is not None:
            return ""
        if row.least_host_bytes is None:
            least = row.least_device_bytes
            return f"needs {'more' if least is None else f'{format_least_bytes(least)} of'} GPU memory"
        return f"needs about {format_least_bytes(row.least_host_bytes)} of RAM"

    def _say(self, words: str) -> None:
        self._screen.print(words, markup=False)


def _size(size_bytes: int | None, up: bool = False) -> str:
    if size_bytes is None:
        return "-"
    return format_least_bytes(size_bytes) if up else format_bytes(size_bytes)


def _cut(words: str, room: int) -> str:
    first = words.splitlines()[0]
    return first if len(first) <= room else f"{first[: room - 4]} ..."
