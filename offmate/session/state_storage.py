"""The files in which a compiled model keeps states and parameters, on the storage paths that the user named."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path as Folder
from typing import NamedTuple

import torch

from ..errors import StorageError
from ..lowering.state_files import StateFiles
from ..planning.storage import KEPT_FREE, PathFigures, figures_of, proportions, take_parameters, together, turn_s
from ..plans.drives import in_files
from ..runtime.devices.device import Device
from ..runtime.replay.binding import HostState
from ..runtime.storage.balance import Balance
from ..runtime.storage.engine import Engine
from ..runtime.storage.files import SystemFiles
from ..runtime.storage.folders import StoragePath
from ..runtime.storage.mapped import MappedStore
from ..sizes import format_bytes
from ..solver.resources import Path
from ..solver.schedule import Schedule
from .parameter_files import let_leave

log = logging.getLogger("offmate")

_MOVED = 0.1  # part by which the paths' seconds differ from the planned ones before anything is said or planned anew
_ITERATIONS = 3  # in a row


class TooFull(StorageError):
    """A plan keeps more in files than there is room for."""


class PathInUse(NamedTuple):
    """A storage path at work: `model.offmate.storage` has one for each.

    Parameters
    ----------
    folder: where the files are. stored_bytes: reserved for what lies there, or move there when they are written
        next, whether or not anything has been written yet, and for the second places of those that are updated early.
    read_bytes_per_s, write_bytes_per_s, both_bytes_per_s: of reads alone, writes alone, and both together. They are
        means over the last iterations in which newer ones count more, or what was known before training.
    """

    folder: Folder
    stored_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float


class StateStorage:
    """The store of optimizer states and activations, and of trained parameters if all paths are for these, too.

    State: `_engine` and `_store`, which is `host.store`, from construction until `close`; the folders are locked all
    that time. `_files`, and the figures of the paths that it was made from; `_slower`, in how many iterations in a row
    the paths were slower than these, and `_said`, whether that was logged. `_why_all_stay`, what was logged last of
    parameters that cannot lie in files.

    Parameters
    ----------
    paths: on which the states lie; none for no store. host: gets the store. device: transfers to and from it.

    Raises: StorageError, ArgumentValueError for paths that cannot be stored in together.
    """

    def __init__(self, paths: Sequence[StoragePath], host: HostState, device: Device) -> None:
        self._engine: Engine | None = None
        self._store: MappedStore | None = None
        self._figures: list[PathFigures] = []
        self._files: StateFiles | None = None
        self._slower, self._said = 0, False
        self._why_all_stay = ""
        self._both = take_parameters(paths)
        if not paths:
            return
        self._figures = [figures_of(path) for path in paths]
        self._engine = engine = Engine(paths, changed=device.changed)
        host.store = self._store = MappedStore(engine, proportions(self._figures))
        self._balance = Balance(engine, self._store)
        self._buffers_bytes = engine.staging_bytes + 2 * device.file_buffers_bytes
        self._files = together(self._figures, self._buffers_bytes)

    def files_for_plans(self, params: Sequence[tuple[str, torch.nn.Parameter]]) -> StateFiles | None:
        """Return what plans that are made from now on count with; None without storage paths.

        The rates are those of the last iterations if they have changed the paths' seconds by more than a tenth.

        Parameters
        ----------
        params: those of the model, by name.
        """
        now = self._measured()
        if now and abs(turn_s(now) / turn_s(self._figures) - 1) > _MOVED:
            self._figures, self._slower, self._said = now, 0, False
            self._files = together(now, self._buffers_bytes)
        return None if self._files is None else replace(self._files, for_parameters=self._both and self._leave(params))

    def _leave(self, params: Sequence[tuple[str, torch.nn.Parameter]]) -> bool:
        may, self._why_all_stay = let_leave(params, said=self._why_all_stay)
        return may

    @property
    def path(self) -> Path | None:
        """The way to all paths together, at the rates of the last iterations; None without storage paths."""
        now = self._measured()
        return together(now, self._buffers_bytes).tier.path if now else None

    @property
    def paths(self) -> tuple[PathInUse, ...]:
        """Return what each path holds, and its rates."""
        if self._engine is None:
            return ()
        engine = self._engine
        reserved = map(sum, zip(engine.bytes_by_path, engine.second_bytes_by_path))
        found = zip(engine.folders, reserved, self._measured())
        return tuple(PathInUse(folder, stored_bytes, *figures.rates) for folder, stored_bytes, figures in found)

    def check_room(self, schedule: Schedule) -> None:
        """Look whether what a schedule keeps in files has room there. Raises: TooFull if not."""
        if self._files is None or self._engine is None:
            return
        needed = schedule.most_bytes_in_files
        if needed > self._files.capacity_bytes:
            what = in_files(schedule)
            if schedule.second_slots_bytes:
                what += ", and second places for those that are updated before the gate,"
            raise TooFull(
                f"{what} need {format_bytes(needed)} in {' and '.join(map(str, self._engine.folders))}, and "
                f"there is room for {format_bytes(self._files.capacity_bytes)}; free space there, or name another disk "
                "as well"
            )

    def why_no_room_beside(self, schedule: Schedule) -> str:
        """Say why what a schedule keeps in files has no room beside what lies there now; empty if it has."""
        if self._engine is None:
            return ""
        free = [SystemFiles().free_bytes(folder) for folder in self._engine.folders]
        shares = proportions(self._figures)
        room = (1 - KEPT_FREE) * min(n_bytes / share for n_bytes, share in zip(free, shares))
        room = min(room, self._files.capacity_bytes) if self._files is not None else room
        needed = schedule.most_bytes_in_files
        if needed <= room:
            return ""
        return f"its files need {format_bytes(needed)} beside those of this one, and {format_bytes(int(room))} are free"

    def make_room(self) -> None:
        """Reserve the files that the next updates write, before any of them begins.

        Raises: StorageError if a path has too little space.
        """
        if self._store is None:
            return
        try:
            self._store.make_room()
        except StorageError as error:
            raise StorageError(
                f"no update was made, and all values are as they were: {error}. Older checkpoints take space there, "
                "and offmate.remove_checkpoint removes them. Then go on"
            ) from error

    def iteration_done(self) -> None:
        """Note that an iteration has ended: states move from a path that is slow now, and a log line says so."""
        if self._engine is None:
            return
        self._balance.iteration_done()
        now = self._measured()
        slower = turn_s(now) / turn_s(self._figures)
        self._slower = self._slower + 1 if slower > 1 + _MOVED else 0
        if self._slower >= _ITERATIONS and not self._said:
            self._said = True
            log.warning("%s", self._slower_words(now, slower))

    def close(self) -> None:
        """Remove the files. Tensors in them keep their values as long as somebody holds them."""
        if self._engine is not None:
            self._engine.close()

    def _measured(self) -> list[PathFigures]:
        if self._engine is None:
            return []
        return [known.measured(means) for known, means in zip(self._figures, self._engine.means)]

    def _slower_words(self, now: Sequence[PathFigures], slower: float) -> str:
        assert self._engine is not None
        worst = max(range(len(now)), key=lambda path: now[path].turn_s / self._figures[path].turn_s)
        rate, planned = (format_bytes(int(2 / one.turn_s)) for one in (now[worst], self._figures[worst]))
        return (
            f"reads and writes of what lies in files take {slower:.2f} times as long as planned: "
            f"{self._engine.folders[worst]} gives {rate} per second, and {planned} were planned. Steps that wait for "
            "them are slower than predicted. Where that is more than a tenth of a step, the step is planned again "
            "beside training. Started again, a program measures the rates anew unless StoragePath names them"
        )
