"""`offmate cards`: the hardware files that come with offmate, and where their figures are from."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from .arguments import Help, output_file

if TYPE_CHECKING:
    from ..machines.hardware import Hardware

_NARROW = 76  # columns; below, rates are left out
_WORDS = {"data sheets": "data sheets", "paper": "a paper", "measured": "measured", "": "not said"}


def add_parser(verbs: Any) -> None:
    """Add the command `cards` to the command line's subparsers; its `run` is `run`."""
    parser = verbs.add_parser(
        "cards",
        help="list the cards that offmate has rates of",
        description="List the cards whose rates come with offmate, for `offmate plan --card NAME` and `offmate fits`: "
        "memory, matrix products in bfloat16, memory traffic, the link to the CPU, and where most figures are from.",
        epilog="examples:\n  offmate cards\n  offmate cards --json cards.json",
        formatter_class=Help,
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the table to FILE")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the cards, by their memory, and write them.

    Returns: the exit status, 0.
    """
    from ..machines.hardware import load, names
    from .screen import console

    cards = sorted(((name, load(name)) for name in names()), key=lambda card: (card[1].device_memory_bytes, card[0]))
    if arguments.json is not None:
        rows = [_as_json(name, machine) for name, machine in cards]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    screen = console(arguments.quiet)
    screen.print(_table(cards, screen.width))
    screen.print(
        "Rates are what is expected to be reached: the shares of a data sheet's peak are assumed, and so are the CPU "
        "and the RAM beside a card. offmate has measured no GPU. A paper measured links and updates of its machines; "
        "the emulated device was measured on a CPU. Each figure has its source in the file. `offmate profile` measures "
        "your machine.",
        style="dim",
    )
    return 0


def _as_json(name: str, machine: Hardware) -> dict[str, Any]:
    return {
        "name": name,
        "words": machine.name,
        "device_memory_bytes": machine.device_memory_bytes,
        "matrix_flops_per_s": dict(machine.matrix_flops_per_s),
        "memory_bytes_per_s": machine.memory_bytes_per_s,
        "in_bytes_per_s": machine.in_bytes_per_s,
        "basis": machine.basis,
    }


def _table(cards: list[tuple[str, Hardware]], width: int) -> Any:
    from rich import box
    from rich.table import Table

    from ..sizes import format_bytes

    wide = width >= _NARROW
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("name", no_wrap=True)
    headings = ("GPU memory", "bf16 TFLOP/s", "memory GB/s", "link GB/s") if wide else ("GPU memory", "bf16 TFLOP/s")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("from", no_wrap=True)
    for name, machine in cards:
        rates = dict(machine.matrix_flops_per_s)
        cells = [format_bytes(machine.device_memory_bytes), _tera(rates.get("bfloat16"))]
        cells += [f"{machine.memory_bytes_per_s / 1e9:,.0f}", f"{machine.in_bytes_per_s / 1e9:,.1f}"] if wide else []
        table.add_row(name, *cells, _WORDS[machine.basis])
    return table


def _tera(flops_per_s: float | None) -> str:
    if flops_per_s is None:
        return "none"
    return f"{flops_per_s / 1e12:,.{0 if flops_per_s >= 1e13 else 1}f}" if flops_per_s >= 1e11 else "<0.1"
