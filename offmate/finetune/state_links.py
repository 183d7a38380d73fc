"""The folders on storage paths that keep states of a run's checkpoints: found again, and removed with these."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
from collections.abc import Sequence
from pathlib import Path, PurePath

from ..files import write_whole
from ..runtime.storage.files import SystemFiles
from ..runtime.storage.links import remove_files
from ..session.linked_states import BELOW, STATES, LinkedStates, find_linked, load_linked

log = logging.getLogger("offmate")

_RECORD = ".states.json"
_NAME = re.compile(r"(step-\d{8,})-[0-9a-f]{8}")
_RUN = re.compile(r"[0-9a-f]{16}")


def linked_states(checkpoint: Path, storage: Sequence[str]) -> LinkedStates:
    """Return the states of a checkpoint that lie on storage paths; parameters and errors are as in `find_linked`."""
    advice = (
        "name the one that contains {below} now with --resume --storage FOLDER. To resume from an older checkpoint "
        f"instead, remove {checkpoint}"
    )
    return find_linked(checkpoint, storage, advice)


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
                        remove_files(SystemFiles(), base / name)
                _remove_empty(base)
            except OSError as error:
                log.warning("states of a checkpoint that is gone stay in %s: %s", base, error)


def _remove_empty(base: Path) -> None:
    """Remove the folders of a run that has nothing on a path any more."""
    for folder in (base, base.parent):
        if SystemFiles().names(folder):
            return
        SystemFiles().remove_folder(folder)
