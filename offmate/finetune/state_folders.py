"""The folders that a run's states and parameters may leave to: checked and measured before the model is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..planning.storage import KEPT_FREE, PathFigures, figures_of, proportions, storage_paths
from ..plans.plan import Plan
from ..progress import working
from ..runtime.storage.engine import Engine
from ..runtime.storage.folders import StoragePath
from ..sizes import format_bytes
from ..solver.items import parameter
from .state_links import Record


def most_sets(keep: int, linkless: bool = True) -> int:
    """Return how often the states of a run lie on a storage path at the most, if it keeps some checkpoints.

    Parameters
    ----------
    linkless: whether the path's file system may have no hard links.
    """
    return keep + 2 if linkless else keep + 1


@dataclass(frozen=True)
class Drive:
    """One of the folders, and what checkpoints have to know of it.

    Parameters
    ----------
    folder: absolute. share: of all bytes, that it gets. free_bytes: on its file system.
    linkless: why its file system has no hard links; empty if it has.
    """

    folder: Path
    share: float
    free_bytes: int
    linkless: str = ""

    def sets(self, keep: int) -> int:
        """Return how often the states of a run lie here at the most, if it keeps some checkpoints.

        A checkpoint has the files that are in use, and the next update writes to others. So there is one set more than
        checkpoints. Where files are copied, a new checkpoint has its copy before an old one goes. Second places of
        states that are updated before the gate come on top, once.
        """
        return most_sets(keep, linkless=bool(self.linkless))


@dataclass(frozen=True)
class StateFolders:
    """Storage paths with their rates, and the room on them.

    Parameters
    ----------
    paths, drives: none if the run keeps all states in RAM.
    """

    paths: tuple[StoragePath, ...] = ()
    drives: tuple[Drive, ...] = ()

    @property
    def given(self) -> tuple[StoragePath, ...] | None:
        """What `storage=` takes."""
        return self.paths or None

    @property
    def read_bytes_per_s(self) -> float:
        """The rate at which all of them are read together; 0 without any."""
        return sum(path.rates[0] for path in self.paths if path.rates is not None)

    def lines(self, plan: Plan, keep: int) -> list[str]:
        """Write what checkpoints need on the drives, and where they copy; nothing if no states lie there.

        Parameters
        ----------
        keep: how many checkpoints stay.
        """
        one_set, once = stored_bytes(plan), _once_bytes(plan)
        if not one_set:
            return []
        found = []
        for drive in self.drives:
            needed = drive.sets(keep) * int(one_set * drive.share) + int(once * drive.share)
            found.append(
                f"checkpoints: {drive.folder} needs {format_bytes(needed)} for the {_what(plan)} in use and in {keep} "
                f"{'checkpoint' if keep == 1 else 'checkpoints'}, and has {format_bytes(drive.free_bytes)} free"
            )
            if drive.linkless:
                found.append(
                    f"checkpoints: the file system of {drive.folder} has no hard links ({drive.linkless}), so every "
                    f"checkpoint copies {format_bytes(int(one_set * drive.share))} there; ext4, xfs and btrfs have them"
                )
        return found

    def doubts(self, plan: Plan, keep: int, checkpoints: Path, beside_bytes: int) -> list[str]:
        """Return a sentence for each drive without room for the states that a plan keeps in files.

        Parameters
        ----------
        keep: how many checkpoints stay. checkpoints: their folder; what they have already counts as free.
        beside_bytes: that the folder's own disk needs besides, for weights and what is not in files.
        """
        return list(self._doubts(plan, keep, checkpoints, beside_bytes))

    def _doubts(self, plan: Plan, keep: int, checkpoints: Path, beside_bytes: int) -> Iterator[str]:
        one_set, once = stored_bytes(plan), _once_bytes(plan)
        record = Record(checkpoints)
        for drive in self.drives if one_set or once else ():
            room = int((1 - KEPT_FREE) * drive.free_bytes) + record.kept_bytes(drive.folder)
            needed = drive.sets(keep) * int(one_set * drive.share) + int(once * drive.share)
            shared = _same_disk(drive.folder, checkpoints)
            room += _bytes_in(checkpoints) if shared else 0
            if needed + (beside_bytes if shared else 0) > room:
                besides = f", which also gets {format_bytes(beside_bytes)} of the output," if shared else ""
                if not one_set:
                    yield (
                        f"activations need {format_bytes(needed)} in {drive.folder}{besides} and there is room for "
                        f"{format_bytes(room)}; free space there, or name a folder on another drive as well"
                    )
                    continue
                yield (
                    f"optimizer {_what(plan)} need {format_bytes(needed)} in {drive.folder}{besides} for those in use "
                    f"and in {keep} checkpoints, and there is room for {format_bytes(room)}; free space there, keep "
                    "fewer checkpoints (keep_checkpoints), or name a folder on another drive as well"
                )


def stored_bytes(plan: Plan) -> int:
    """Return the bytes that a plan keeps in files."""
    return plan.schedule.bytes_in_files


def _once_bytes(plan: Plan) -> int:
    """Return the bytes in files that no checkpoint keeps: second places, and activations."""
    return plan.schedule.most_bytes_in_files - plan.schedule.bytes_in_files


def stored_weights_bytes(plan: Plan) -> int:
    """Return those among them that are of trained parameters."""
    sizes = plan.schedule.item_bytes
    return sum(sizes.get(parameter(name), 0) for name in plan.schedule.parameters_in_files)


def _what(plan: Plan) -> str:
    return "states and parameters" if stored_weights_bytes(plan) else "states"


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _same_disk(folder: Path, other: Path) -> bool:
    near = next(parent for parent in (other, *other.absolute().parents) if parent.exists())
    return folder.exists() and os.stat(folder).st_dev == os.stat(near).st_dev


def measured(folders: tuple[str, ...], parameters: bool = False) -> StateFolders:
    """Measure the drives of these folders; nothing stays in them.

    Parameters
    ----------
    parameters: whether trained parameters may lie there, too.

    Raises: StorageError for a folder that is missing, in use or cannot be written to, ArgumentValueError for a rate in
    its place and for two folders on one drive.
    """
    if not folders:
        return StateFolders()
    paths = storage_paths(folders)
    with working("measuring the drives of --storage"):
        with Engine(paths) as engine:  # it says what is wrong with them
            linkless = engine.why_no_links()
        figures = [figures_of(path) for path in paths]
    drives = (
        Drive(folder, share, one.free_bytes, linkless.get(folder, ""))
        for folder, share, one in zip((Path(path.folder).resolve() for path in paths), proportions(figures), figures)
    )
    return StateFolders(tuple(_with_rates(path, one, parameters) for path, one in zip(paths, figures)), tuple(drives))


def _with_rates(path: StoragePath, figures: PathFigures, parameters: bool) -> StoragePath:
    """Return a path with its rates, so that it is measured once, and with what it is for."""
    rates = figures.read_bytes_per_s, figures.write_bytes_per_s, figures.both_bytes_per_s
    return StoragePath(path.folder, *rates, parameters=parameters)
