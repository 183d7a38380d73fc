"""The folders that a run's optimizer states may leave to: checked and measured before anything of the model is read."""

from __future__ import annotations

from dataclasses import dataclass

from ..planning.storage import PathFigures, figures_of, storage_paths, together
from ..plans.plan import Plan
from ..progress import working
from ..runtime.storage.engine import Engine
from ..runtime.storage.folders import StoragePath
from ..sizes import format_bytes


@dataclass(frozen=True)
class StateFolders:
    """Storage paths with their rates, and the most bytes of states that they may hold together.

    Parameters
    ----------
    paths: none if the run keeps all states in RAM.
    """

    paths: tuple[StoragePath, ...] = ()
    capacity_bytes: int = 0

    @property
    def given(self) -> tuple[StoragePath, ...] | None:
        """What `storage=` takes."""
        return self.paths or None

    def doubt(self, plan: Plan) -> list[str]:
        """Return a sentence if the states that a plan keeps in files need more than these have room for."""
        schedule = plan.schedule
        names = schedule.states_in_files if self.paths else ()
        needed = sum(schedule.item_bytes[item] for name in names for item in schedule.states.get(name, ()))
        if needed <= self.capacity_bytes:
            return []
        return [
            f"optimizer states need {format_bytes(needed)} in the folders of --storage, and there is room for "
            f"{format_bytes(self.capacity_bytes)}; free space there, or name a folder on another drive as well"
        ]


def measured(folders: tuple[str, ...]) -> StateFolders:
    """Measure the drives of these folders; nothing stays in them.

    Raises: StorageError for a folder that is missing, in use or cannot be written to, ArgumentValueError for a rate in
    its place and for two folders on one drive.
    """
    if not folders:
        return StateFolders()
    paths = storage_paths(folders)
    with working("measuring the drives of --storage"):
        with Engine(paths):
            pass  # it says what is wrong with them
        figures = [figures_of(path) for path in paths]
    known = tuple(_with_rates(path, one) for path, one in zip(paths, figures))
    return StateFolders(known, together(figures, buffers_bytes=0).capacity_bytes)


def _with_rates(path: StoragePath, figures: PathFigures) -> StoragePath:
    """Return a path with its rates, so that it is measured once."""
    return StoragePath(path.folder, figures.read_bytes_per_s, figures.write_bytes_per_s, figures.both_bytes_per_s)
