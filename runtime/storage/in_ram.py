"""Folders whose files are in RAM, where nothing that leaves RAM should go."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

log = logging.getLogger("offmate")

_MOUNTS = Path("/proc/self/mountinfo")
_KINDS = ("tmpfs", "ramfs")


@functools.cache  # once for each folder
def warn_of_ram(folder: Path) -> None:
    """Say that the files of a folder are in RAM, if they are."""
    kind = _file_system(folder)
    if kind in _KINDS:
        log.warning(
            "%s is in RAM (%s): what is stored there takes the RAM that it is to free, and no budget counts it. Name a "
            "folder on an NVMe drive",
            folder, kind,
        )  # fmt: skip


def _file_system(folder: Path) -> str:
    """Return the kind of a folder's file system; an empty string if the system does not say."""
    try:
        device = os.stat(folder).st_dev
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    found = (line.partition(" - ")[2].split() for line in lines if line.split()[2:3] == [number])
    return next((words[0] for words in found if words), "")
