"""Drives as the command line names them: those of a plan, and those that `offmate profile` measures and shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentValueError, OffmateError, StorageError
from ..progress import hidden
from ..sizes import format_bytes, format_wear

if TYPE_CHECKING:
    from rich.console import Console

    from ..machines.drive_rates import Measured
    from ..machines.drives import Drive
    from ..machines.hardware import Hardware
    from ..progress import Progress
    from ..runtime.storage.folders import StoragePath

_RATES = ("read_bytes_per_s", "write_bytes_per_s", "both_bytes_per_s")


def planned_storage(
    given: Sequence[float | StoragePath] | None, machine: Hardware, parameters: bool = False
) -> float | tuple[StoragePath, ...] | None:
    """Return what `--storage` names, as `offmate.plan` takes it: each folder with the rates of the machine's file.

    Parameters
    ----------
    parameters: whether trained parameters may lie there, too.

    Raises: ArgumentValueError for a folder that the file does not list or that is named twice, for a rate of reads
    alone among several, and for parameters where nothing can be written.
    """
    from ..planning.storage import check_apart
    from ..runtime.storage.folders import StoragePath

    alone = [one for one in given or () if isinstance(one, float)]
    if parameters and (alone or not given):
        raise ArgumentValueError(
            "--storage-parameters writes trained parameters to the drives of --storage in every step, and "
            f"{f'of one only the rate of reads is given, {_rate(alone[0])}' if alone else 'none is named'}; add a "
            "folder or READ,WRITE, such as --storage 7GB/s,5GB/s, or leave it out"
        )
    if not given:
        return None
    if alone and len(given) > 1:
        raise ArgumentValueError(
            f"--storage names several drives, and for one of them only the rate of reads, {_rate(alone[0])}; write "
            "READ,WRITE for each"
        )
    if alone:
        return alone[0]
    paths = []
    for number, path in enumerate((one for one in given if isinstance(one, StoragePath)), start=1):
        if path.rates is None:
            paths.append(_listed(os.fspath(path.folder), machine))
        else:
            paths.append(replace(path, folder=f"drive {number}") if len(given) > 1 else path)
    check_apart(paths)
    return tuple(replace(path, parameters=parameters) for path in paths)


def _listed(folder: str, machine: Hardware) -> StoragePath:
    from ..runtime.storage.folders import StoragePath

    known = machine.drive(folder)
    if known is None:
        listed = ", ".join(one.folder for one in machine.drives)
        raise ArgumentValueError(
            f"--storage {folder}: the rates of that folder's drive are not known, since {machine.name} lists "
            f"{f'only {listed}' if listed else 'no drives'}. Measure it on its machine with `offmate profile --storage "
            f"{folder} --json FILE` and plan with --card FILE, or give its rates: --storage 7GB/s,5GB/s"
        )
    return StoragePath(folder, known.read_bytes_per_s, known.write_bytes_per_s, known.both_bytes_per_s)


def asked_paths(folders: Sequence[str], sustained: bool, yes: bool) -> dict[StoragePath, int]:
    """Return the paths to measure, each with the most bytes that `--sustained` writes there, 0 without it.

    Raises: ArgumentValueError for folders that cannot be measured, and if nobody can be asked; OffmateError if the
    answer is no.
    """
    from ..machines.drive_rates import check_drives, most_bytes
    from ..planning.storage import storage_paths

    if not folders:
        if sustained:
            raise ArgumentValueError("--sustained measures the drives of --storage; name a folder: --storage DIR")
        return {}
    paths = storage_paths(folders)
    try:
        check_drives(paths, sustained)
        amounts = {path: most_bytes(path) if sustained else 0 for path in paths}
    except StorageError as error:
        raise ArgumentValueError(str(error)) from None
    if sustained and not yes:
        _ask(amounts)
    return amounts


def _ask(amounts: dict[StoragePath, int]) -> None:
    from ..plans.drives import RATED_WORDS

    lines = [
        f"--sustained writes at most {format_bytes(amount)} ({format_wear(amount)}) to {os.fspath(path.folder)}, and "
        "removes it afterwards."
        for path, amount in amounts.items()
    ]
    lines += [
        "It stops earlier where the rate of writes falls and then stays as it is.",
        f"Writes wear a drive: {RATED_WORDS}.",
    ]
    words = "\n".join(lines)
    if not sys.stdin.isatty():
        raise ArgumentValueError(f"{words}\nAdd --yes to let it, since nobody can be asked without a terminal")
    with hidden():
        try:
            answer = input(f"{words}\nContinue? [y/N] ")
        except EOFError:  # Ctrl-D
            answer = "no"
    if answer.strip().lower() not in ("y", "yes"):
        raise OffmateError("stopped; nothing was measured or written")


def measured_drives(amounts: dict[StoragePath, int], say: Progress) -> list[Measured]:
    """Measure the paths of `asked_paths`.

    Raises: StorageError for a drive that fails.
    """
    from ..machines.drive_rates import measure_drive, measure_sustained

    return [
        measure_sustained(path, say, amount) if amount else measure_drive(path, say) for path, amount in amounts.items()
    ]


def show_drives(screen: Console, drives: Sequence[Measured]) -> None:
    """Print the rates of each drive, how those of writes went on, and how training is told of them."""
    if not drives:
        return
    screen.print()
    screen.print(_table([one.drive for one in drives]))
    for one in drives:
        if one.sustained is not None:
            screen.print(f"{one.drive.folder}: {one.words}.", markup=False)
    if sustained := [one.drive for one in drives if one.sustained is not None]:
        screen.print(f"In Python: {_as_argument(sustained)}", markup=False, soft_wrap=True)  # to be copied
    if any(one.sustained is None for one in drives):
        screen.print(
            f"Measured with {_probe()}, which a drive's cache may hold; --sustained measures past it.", markup=False
        )


def _probe() -> str:
    from ..machines.drive_rates import PROBE_BYTES

    return format_bytes(PROBE_BYTES)


def _as_argument(drives: Sequence[Drive]) -> str:
    paths = []
    for drive in drives:
        named = {name: _rate(getattr(drive, f"{name}_bytes_per_s")) for name in ("read", "write", "both")}
        rates = ", ".join(f"{name}={rate!r}" for name, rate in named.items())
        paths.append(f"offmate.StoragePath({drive.folder!r}, {rates})")
    return f"storage={paths[0]}" if len(paths) == 1 else f"storage=[{', '.join(paths)}]"


def _rate(bytes_per_s: float) -> str:
    """Write a rate as it can be typed."""
    return f"{format_wear(int(bytes_per_s))}/s".replace(" ", "").replace(",", "")


def _table(drives: Sequence[Drive]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, title="Drives, per second", title_justify="left", padding=(0, 1, 0, 0)
    )
    table.add_column("folder", overflow="fold")
    for heading in ("read", "write", "both"):
        table.add_column(heading, justify="right", no_wrap=True)
    for drive in drives:
        table.add_row(drive.folder, *(format_wear(int(getattr(drive, key))) for key in _RATES))
    return table
