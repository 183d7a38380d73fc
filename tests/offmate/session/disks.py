"""Disks that fail, and files that are spoilt, under what is compiled."""

from __future__ import annotations

import errno
import functools
from pathlib import Path

import pytest
from offmate.runtime.storage.engine import Engine

from offmate.session import state_storage

from ...runtime.storage.faulty import Faulty, refused

broken = refused(errno.EIO)
full = refused(errno.ENOSPC)


def use_faulty_files(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """Files of what is compiled from now on, which fail as the test asks."""
    faulty = Faulty()
    engine = functools.partial(Engine, files=faulty, n_threads=2, request_bytes=1 << 14)
    monkeypatch.setattr(state_storage, "Engine", engine)
    return faulty


def flip_a_bit(file: Path, offset: int) -> None:
    with file.open("r+b") as handle:
        handle.seek(offset)
        byte = handle.read(1)
        handle.seek(offset)
        handle.write(bytes([byte[0] ^ 1]))
