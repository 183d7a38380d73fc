"""`offmate profile`: measure this machine and write its rates to a hardware file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .arguments import Help, device, output_file
from .drives import asked_paths, measured_drives, show_drives

if TYPE_CHECKING:
    from ..machines.drive_rates import Measured

_EXAMPLES = """examples:
  offmate profile
  offmate profile --json mine.json
  offmate profile --device cuda --json card.json
  offmate profile --storage /mnt/nvme/offmate --sustained --json mine.json
  offmate plan gpt2 --hardware mine.json
exit status: 0 success, 1 it failed, 2 the arguments cannot work
"""

_IDLE_LOAD = 1.0  # mean number of runnable processes (the load average)


def add_parser(verbs: Any) -> None:
    """Add the command `profile` to the command line's subparsers; its `run` is `run`."""
    parser = verbs.add_parser(
        "profile",
        help="measure this machine's copies, updates, matrix products and memory into a hardware file",
        description="Measure this machine: copy rates by size and direction, both directions at once, optimizer "
        "updates on CPU and device, matrix products, memory, and drives if any are named. This takes about half a "
        "minute; run nothing else then.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument(
        "--device", type=device, default="emulated", help='"cuda", "cuda:1", "emulated" (default: %(default)s)'
    )
    parser.add_argument(
        "--storage",
        action="append",
        default=[],
        metavar="DIR",
        help="also measure the drive of this folder, in which optimizer states may lie; it may be given several times",
    )
    parser.add_argument(
        "--sustained",
        action="store_true",
        help="write past the drives' caches: minutes, and up to 512 GiB on each. It says how much before, and asks",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask before --sustained")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the hardware file")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure the machine, print the rates and write the file.

    Returns: the exit status, 0. Raises: DeviceError if the device does not exist, OffmateError for drives that cannot
    be measured.
    """
    from torch.optim import AdamW

    from ..machines.benchmark import measure_machine
    from ..machines.devices import device_kind
    from ..optim.masters import with_master_weights
    from ..progress import planning_progress

    kind = device_kind(arguments.device)
    asked = asked_paths(arguments.storage, arguments.sustained, arguments.yes)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    with planning_progress("measuring") as say:
        data = measure_machine(say, kind=kind, masters=with_master_weights(AdamW))
        drives = measured_drives(asked, say)
    if drives:
        data |= {"storage": [one.row() for one in drives]}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    if not arguments.quiet:
        _show(data, load, drives)
    return 0


def _show(data: dict[str, Any], load: float, drives: Sequence[Measured]) -> None:
    from ..reports.units import format_seconds
    from ..sizes import format_bytes
    from .screen import console, copies_table, pairs

    def rate(name: str) -> str:
        return f"{format_bytes(int(data[name]['value']))}/s"

    screen = console()
    rates = {dtype: figure["value"] / 1e9 for dtype, figure in data["matrix_flops_per_s"].items()}
    products = ", ".join(f"{dtype} {r:,.{0 if r >= 10 else 2}f} GFLOP/s" for dtype, r in rates.items())
    screen.print(data["name"], markup=False)
    screen.print()
    screen.print(copies_table(data["copies"]))
    updates = f"CPU {rate('cpu_update_bytes_per_s')}, device {rate('device_update_bytes_per_s')}"
    masters = f"CPU {rate('cpu_master_update_bytes_per_s')} where bf16 has float32 copies, counted as float32"
    rows = [("updates", f"{updates} of float32 parameters"), ("", masters), ("matrices", products)]
    rows += [("memory", rate("memory_bytes_per_s")), ("least kernel", format_seconds(data["launch_s"]["value"]))]
    if "instruction_s" in data:
        rows.append(("launch", f"{format_seconds(data['instruction_s']['value'])} of the CPU per operator"))
    screen.print(pairs(rows))
    show_drives(screen, drives)
    if load > _IDLE_LOAD:
        screen.print(f"\nOther processes were busy (load {load:.1f} in the minute before), so rates may be too low.")
