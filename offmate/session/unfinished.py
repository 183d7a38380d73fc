"""Checkpoints that a killed process has not finished: what they have on storage paths is known, and removed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..runtime.storage.files import SystemFiles
from ..runtime.storage.links import remove_files
from .linked_states import BELOW

log = logging.getLogger("offmate")

_RECORD = re.compile(r"\.(.+)\.([0-9a-f]{8})\.links")
_RUN = re.compile(r"[0-9a-f]{16}")


def aside_of(target: Path) -> Path:
    """Return a new name beside a checkpoint's folder, under which it is written."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def noted(aside: Path, linked: Sequence[Path]) -> Iterator[None]:
    """Keep a note of a checkpoint that the body writes, which its process holds a lock on.

    Where the file system has no locks, there is no note, since nobody could tell whether the process still runs.

    Parameters
    ----------
    aside: the folder in which it is written, as `aside_of` returns it. linked: the folders on storage paths that get
        its files.
    """
    note = aside.with_suffix(".links")
    draft = note.with_suffix(".new")
    with contextlib.ExitStack() as held:
        try:
            file = held.enter_context(draft.open("w"))
            json.dump([str(folder) for folder in linked], file)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(draft, note)  # whoever finds it finds it locked
        except OSError as error:
            log.debug("no note of %s is kept: %s", aside, error)
        try:
            yield
        finally:
            for path in (draft, note):
                with contextlib.suppress(OSError):
                    path.unlink()


def sweep(parent: Path) -> None:
    """Remove what killed processes have left of checkpoints in a folder; what cannot be removed stays for next time."""
    for note in parent.glob(".*.links"):
        found = _RECORD.fullmatch(note.name)
        with contextlib.suppress(OSError, ValueError):
            if found is not None:
                _sweep(note, parent / f".{found[1]}.{found[2]}.tmp", found[1])


def _sweep(note: Path, aside: Path, name: str) -> None:
    with note.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Without it, the checkpoint was completed, and has the files now.
        if aside.is_dir():
            for folder in map(Path, json.load(file)):
                *_, below, run, last = ("", "", *folder.parts)
                # Whatever a note says, nothing goes that no checkpoint of this name has made.
                if (below, last) == (BELOW, name) and _RUN.fullmatch(run) and folder.is_dir():
                    remove_files(SystemFiles(), folder, n_above=2)
            shutil.rmtree(aside)
        note.unlink()
