"""Storage paths as users name them, and what several of them do together."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from ..errors import ArgumentTypeError, ArgumentValueError
from ..lowering.frozen_files import FrozenFiles
from ..lowering.state_files import StateFiles, StatePath
from ..machines.devices import EMULATED, accelerator
from ..machines.drive_rates import PROBE_BYTES, check_free
from ..machines.drives import same_folder
from ..machines.hardware import Hardware
from ..runtime.devices.ring import BUFFERS_BYTES
from ..runtime.storage.disk_queue import N_THREADS, REQUEST_BYTES
from ..runtime.storage.disk_rates import MeanRates
from ..runtime.storage.engine import Engine
from ..runtime.storage.files import SystemFiles
from ..runtime.storage.folders import StoragePath
from ..runtime.storage.measure import rates
from ..sizes import format_bytes, parse_rate
from .files import files_elsewhere
from .request import Request

log = logging.getLogger("offmate")

Folder: TypeAlias = str | os.PathLike[str] | StoragePath

KEPT_FREE = 0.02  # of a disk's free bytes
_DRIVE_BYTES = 2 * 10**12  # free on a drive of another machine that does not say
_EXPECTED = "name folders as text, as Path or as offmate.StoragePath(...)"


class PathFigures(NamedTuple):
    """What is known of a storage path: its folder, rates in bytes per second, and its free bytes."""

    folder: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float
    free_bytes: int

    @property
    def rates(self) -> tuple[float, float, float]:
        """Rates of reads alone, of writes alone and of both together."""
        return self.read_bytes_per_s, self.write_bytes_per_s, self.both_bytes_per_s

    @property
    def turn_s(self) -> float:
        """Seconds in which a byte is read and a byte is written, as every update of a state does."""
        return max(1 / self.read_bytes_per_s, 1 / self.write_bytes_per_s, 2 / self.both_bytes_per_s)

    def slower(self, factor: float) -> PathFigures:
        """Return the figures of a path that takes so many times as long."""
        return self._at(*(rate / factor for rate in self.rates))

    def measured(self, means: MeanRates) -> PathFigures:
        """Return the figures of the path as its disk has worked in the last iterations.

        A rate at which too little was done is the known one, slowed down as all that was done.
        """
        factor = means.slower_than(self.rates)
        known = self if factor is None else self.slower(factor)
        return self._at(*(now or before for now, before in zip(means.rates, known.rates)))

    def _at(self, read: float, write: float, both: float) -> PathFigures:
        return self._replace(read_bytes_per_s=read, write_bytes_per_s=write, both_bytes_per_s=both)


def storage_paths(storage: Folder | Sequence[Folder] | None) -> tuple[StoragePath, ...]:
    """Return the storage paths that `storage=` names: one folder, or several.

    Raises: ArgumentTypeError, ArgumentValueError for anything else.
    """
    if storage is None:
        return ()
    named = [storage] if isinstance(storage, str | bytes | os.PathLike | StoragePath) else storage
    if not isinstance(named, Sequence) or not named:
        raise ArgumentTypeError(
            f"storage={storage!r} names no folder; give a folder such as '/mnt/nvme/offmate', or a list of folders or "
            "offmate.StoragePath(...), each on a disk of its own"
        )
    return tuple(one if isinstance(one, StoragePath) else StoragePath(_folder(one)) for one in named)


def _folder(one: object) -> str | os.PathLike[str]:
    if isinstance(one, str) and not one.strip():
        raise ArgumentValueError(f"storage={one!r} names no folder; give one such as '/mnt/nvme/offmate'")
    if isinstance(one, str) and one.rstrip().endswith("/s"):
        raise ArgumentValueError(
            f"storage={one!r} is a rate, and training needs a folder: storage=['/mnt/nvme/offmate'], or "
            f"offmate.StoragePath(folder, read={one!r}, write=...) for one whose rates are known"
        )
    if isinstance(one, FrozenFiles):
        raise ArgumentTypeError(
            "storage= says which frozen parameters lie in files of another machine, which only a plan with hardware= "
            f"takes; on this machine their files are found. Leave it out, and {_EXPECTED}"
        )
    if not isinstance(one, str | os.PathLike):
        raise ArgumentTypeError(f"storage= has {one!r}, of type {type(one).__name__}; {_EXPECTED}")
    return one


def proportions(figures: Sequence[PathFigures]) -> tuple[float, ...]:
    """Return the share of the bytes that each path gets, so that all take as long for one read and one write of them.

    This is the optimum of the linear program that minimises that time over all shares: each path bounds its own share
    alone.
    """
    shares = [1 / one.turn_s for one in figures]
    return tuple(share / sum(shares) for share in shares)


def together(figures: Sequence[PathFigures], buffers_bytes: int) -> StateFiles:
    """Return what the paths do together when the bytes lie on them in these proportions.

    Parameters
    ----------
    buffers_bytes: RAM that copies between them and the device pass.
    """
    shared = list(zip(figures, proportions(figures)))
    return StateFiles(
        read_bytes_per_s=min(one.read_bytes_per_s / share for one, share in shared),
        write_bytes_per_s=min(one.write_bytes_per_s / share for one, share in shared),
        both_bytes_per_s=min(one.both_bytes_per_s / share for one, share in shared),
        capacity_bytes=int(min((1 - KEPT_FREE) * one.free_bytes / share for one, share in shared)),
        buffers_bytes=buffers_bytes,
        paths=tuple(StatePath(one.folder, *one.rates, share) for one, share in shared),
    )


def turn_s(figures: Sequence[PathFigures]) -> float:
    """Return the seconds in which all paths together read a byte and write a byte, if they share the bytes best."""
    return 1 / sum(1 / one.turn_s for one in figures)


def figures_of(path: StoragePath) -> PathFigures:
    """Return what is known of a path on this machine; rates that were not given are measured.

    Raises: StorageError if it cannot be stored in.
    """
    folder, found = Path(os.fspath(path.folder)), path.rates
    if found is None:
        with contextlib.suppress(OSError):  # opening it says what is wrong
            check_free(path, 2 * PROBE_BYTES, ", or give its rates: offmate.StoragePath(folder, read=..., write=...)")
        measured = rates(path, PROBE_BYTES)
        found = measured.read_bytes_per_s, measured.write_bytes_per_s, measured.both_bytes_per_s
        read, write, both = (format_bytes(int(rate)) for rate in found)
        log.info("%s: %s read, %s written, %s of both per second", folder, read, write, both)
    try:
        free_bytes = SystemFiles().free_bytes(folder)
    except OSError:
        free_bytes = 0  # opening it says what is wrong
    return _figures(str(folder), found, free_bytes)


def _figures(folder: str, rates_of: tuple[float, float, float], free_bytes: int) -> PathFigures:
    read, write, both = rates_of
    return PathFigures(folder, read, write, both, free_bytes)


def storage_here(paths: Sequence[StoragePath], device: str) -> StateFiles | None:
    """Return what storage paths of this machine do together, as a compiled model will find; None without any."""
    if not paths:
        return None
    with Engine(paths) as engine:  # says what is wrong with them
        buffers_bytes = engine.staging_bytes
    found = together([figures_of(path) for path in paths], buffers_bytes + _on_the_way_bytes(device))
    return replace(found, for_parameters=take_parameters(paths))


def take_parameters(paths: Sequence[StoragePath]) -> bool:
    """Return whether trained parameters may lie on storage paths, too, which all of them have to allow."""
    return all(path.parameters for path in paths)


def _on_the_way_bytes(device: str) -> int:
    """Return the RAM through which copies between files and the device pass, beside the engine's own."""
    return 0 if accelerator(device) is None else 2 * BUFFERS_BYTES


def usual_drive(device: str | None) -> StateFiles:
    """Return a usual NVMe drive, to find out whether one would help.

    Parameters
    ----------
    device: kind of device of this machine; None for another machine.
    """
    on_the_way = 2 * BUFFERS_BYTES if device is None else _on_the_way_bytes(device)
    return together([PathFigures("", 7e9, 5e9, 5.8e9, _DRIVE_BYTES)], on_the_way + N_THREADS * REQUEST_BYTES)


def with_drives(
    model: torch.nn.Module,
    storage: float | Folder | Sequence[Folder | FrozenFiles] | None,
    request: Request,
    machine: Hardware,
    planned: bool,
) -> Request:
    """Return the request for another machine with its drives.

    Parameters
    ----------
    storage: its storage paths, or only the rate at which it reads a checkpoint. Paths without rates have those that the
        machine's file lists. `FrozenFiles` among the paths say which frozen parameters lie in files; without them,
        those that RAM has no room for do.
    planned: whether an optimizer's updates are planned, so that its states may leave.

    Raises: ArgumentTypeError, ArgumentValueError if `storage` is neither, or names a folder whose rates are not known.
    """
    if storage is None:
        return request
    if isinstance(storage, float | int) or (isinstance(storage, str) and storage.rstrip().endswith("/s")):
        return replace(request, files=files_elsewhere(model, parse_rate(storage, "storage"), request.host_budget_bytes))
    if isinstance(storage, Sequence) and not isinstance(storage, str):
        known = [one for one in storage if isinstance(one, FrozenFiles)]
        folders = [one for one in storage if not isinstance(one, FrozenFiles)]
        if known:
            drives = with_drives(model, folders or None, request, machine, planned)
            return replace(drives, files=known[0] if known[0].names else None)
        paths = storage_paths(folders)
    else:
        paths = storage_paths(storage)
    check_apart(paths)
    figures = [figures_elsewhere(path, machine) for path in paths]
    on_the_way = 0 if request.device == EMULATED else 2 * BUFFERS_BYTES
    found = together(figures, on_the_way + len(paths) * N_THREADS * REQUEST_BYTES)
    found = replace(found, for_parameters=take_parameters(paths))
    files = files_elsewhere(model, found.read_bytes_per_s, request.host_budget_bytes)
    return replace(request, files=files, storage=found if planned else None)


def check_apart(paths: Sequence[StoragePath]) -> None:
    """Raise ArgumentValueError if two paths are one folder of another machine."""
    for number, path in enumerate(paths):
        for other in paths[:number]:
            if same_folder(path.folder, other.folder):
                raise ArgumentValueError(
                    f"{os.fspath(other.folder)} and {os.fspath(path.folder)} are the same folder; name each one once"
                )


def figures_elsewhere(path: StoragePath, machine: Hardware) -> PathFigures:
    """Return what is known of a path on another machine: its own rates, or those that the machine's file lists.

    Raises: ArgumentValueError if neither is known.
    """
    folder = os.fspath(path.folder)
    known = machine.drive(folder)
    free_bytes = (known.free_bytes if known is not None else 0) or _DRIVE_BYTES
    if path.rates is not None:
        return _figures(folder, path.rates, free_bytes)
    if known is not None:
        rates_of = known.read_bytes_per_s, known.write_bytes_per_s, known.both_bytes_per_s
        return _figures(folder, rates_of, free_bytes)
    listed = ", ".join(one.folder for one in machine.drives)
    raise ArgumentValueError(
        f"storage={folder!r}: the rates of that folder's drive are not known, since {machine.name} lists "
        f"{f'only {listed}' if listed else 'no drives'}, and a drive of another machine cannot be measured here. "
        f"Measure it there (offmate profile --storage {folder} --json FILE) and name that file, or give its rates: "
        f"offmate.StoragePath({folder!r}, read='7GB/s', write='5GB/s'), or storage='7GB/s' where it only reads the "
        "checkpoint"
    )
