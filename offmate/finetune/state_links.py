"""The folders on storage paths that keep states of a run's checkpoints: found again, and removed with these."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
from collections.abc import Sequence
from pathlib import Path, PurePath

from ..errors import OffmateError
from ..files import write_whole
from ..runtime.storage.files import SystemFiles
from ..session.linked_states import STATES, LinkedStates, load_linked

log = logging.getLogger("offmate")

BELOW = "offmate-checkpoints"
"""The folder on a storage path below which all runs keep states."""
_RECORD = ".states.json"
_NAME = re.compile(r"(step-\d{8,})-[0-9a-f]{8}")
_RUN = re.compile(r"[0-9a-f]{16}")


class Record:
    """What a run knows of its folders on storage paths, kept beside its checkpoints.

    State: `run`, by which its folders are called, and `folders`, the storage paths until now; both are in a file.

    Parameters
    ----------
    checkpoints: the folder of the checkpoints.
    """

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self.run, self.folders = secrets.token_hex(8), list[str]()
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            content = json.loads((checkpoints / _RECORD).read_text())
            if _RUN.fullmatch(content["run"]):
                self.run, self.folders = content["run"], list(map(str, content["folders"]))

    def new_folder(self, name: str, paths: Sequence[str]) -> PurePath:
        """Return the name of a new folder for a checkpoint, below each storage path.

        Parameters
        ----------
        name: of the checkpoint. paths: the storage paths.

        Raises: OffmateError if it cannot be written down where the folders are.
        """
        resolved = (str(Path(path).resolve()) for path in paths)
        more = [path for path in resolved if path not in self.folders]
        if more:
            self.folders += more
            content = json.dumps({"run": self.run, "folders": self.folders})
            write_whole(self._checkpoints / _RECORD, content)
        return PurePath(BELOW, self.run, f"{name}-{secrets.token_hex(4)}")

    def kept_bytes(self, path: Path) -> int:
        """Return how many bytes of a storage path the run's checkpoints have."""
        found = {}
        for file in (path / BELOW / self.run).glob("*/*.tensor"):
            with contextlib.suppress(OSError):
                stat = file.stat()
                found[stat.st_ino] = stat.st_size
        return sum(found.values())

    def sweep(self) -> None:
        """Remove the folders whose checkpoint is gone, or was never completed. What cannot be removed is said."""
        used, unknown = set[str](), set[str]()
        for manifest in self._checkpoints.glob(f"step-*/{STATES}"):
            try:
                used |= {folder.name for folder in load_linked(manifest).folders}
            except (OSError, ValueError):
                unknown.add(manifest.parent.name)  # it may be repaired
        for base in (Path(folder, BELOW, self.run) for folder in self.folders):
            if not base.is_dir():
                continue  # its drive may be connected again
            try:
                for name in SystemFiles().names(base):
                    step = _NAME.fullmatch(name)
                    if step is not None and name not in used and step[1] not in unknown:
                        _remove(base / name)
                _remove_empty(base)
            except OSError as error:
                log.warning("states of a checkpoint that is gone stay in %s: %s", base, error)


def _remove(folder: Path) -> None:
    """Remove a folder of files."""
    files = SystemFiles()
    for name in files.names(folder):
        files.unlink(folder / name)
    files.remove_folder(folder)


def _remove_empty(base: Path) -> None:
    """Remove the folders of a run that has nothing on a path any more."""
    for folder in (base, base.parent):
        if SystemFiles().names(folder):
            return
        SystemFiles().remove_folder(folder)


def linked_states(checkpoint: Path, storage: Sequence[str] = ()) -> LinkedStates:
    """Return the states of a checkpoint that lie on storage paths.

    Parameters
    ----------
    storage: folders that may have them, if those that the checkpoint names are elsewhere now.

    Raises: OffmateError if a folder is missing. OSError, ValueError if the checkpoint does not say where they are.
    """
    if not (checkpoint / STATES).exists():
        return LinkedStates()
    linked = load_linked(checkpoint / STATES)
    return linked.moved({folder: _found(checkpoint, linked, folder, storage) for folder in linked.folders})


def _found(checkpoint: Path, linked: LinkedStates, folder: Path, storage: Sequence[str]) -> Path:
    if folder.is_dir():
        return folder
    names = [file.name for file in linked.files if file.parent == folder]
    below = PurePath(*folder.parts[-3:])
    for place in storage:
        there = Path(place) / below
        if all((there / name).is_file() for name in names):
            return there
    home = Path(*folder.parts[:-3])
    looked = f", and not in {' or '.join(str(Path(place)) for place in storage)} either" if storage else ""
    raise OffmateError(
        f"{checkpoint}: optimizer states of this checkpoint lie in {folder}, which is missing{looked}. Connect the "
        f"drive of {home}. If that folder has another path now, name it: --resume --storage FOLDER, where FOLDER "
        f"contains {below}. To resume from an older checkpoint instead, remove {checkpoint}"
    )
