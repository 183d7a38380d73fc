"""What a checkpoint keeps of stored tensors: a second name of each file, in a folder on the same path."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath

from ...errors import StorageError
from .. import interrupts
from ..events import Event
from .files import Files
from .folders import LINKLESS, Folder
from .host_bytes import AlignedBytes
from .mapping import Showing
from .open_file import OpenFile, failed
from .pieces import Piece
from .stored import Stored
from .stored_file import StoredFile

log = logging.getLogger("offmate")

_COPY_BYTES = 1 << 22  # that are copied at once where there are no links


def link(stored: Sequence[Stored], below: PurePath, seal: Callable[[Stored], Event]) -> list[list[Piece]]:
    """Give the files of stored tensors second names, after which they are never written again.

    Where the file system has no links, they are copied and may be written again.

    Parameters
    ----------
    below: the folder that gets the names, below the folder of each path. seal: has the chunks without a checksum read.

    Returns: by tensor, its pieces in order.
    Raises: StorageError if a file cannot be kept, if writing it has failed before, or if not all of a tensor has been
    written.
    """
    for one in stored:
        one.wait()
    files = [file for one in stored for file in one.places.files()]
    linkless = {folder for folder in {file.folder: None for file in files} if folder.why_no_links() is not None}
    for one in stored:
        _part(one, [file for file in one.places.files() if file.folder not in linkless])
    for event in [seal(one) for one in stored]:
        event.synchronize()
    _sync(files)
    folders = tuple(dict.fromkeys(file.folder for file in files))
    try:
        for folder in folders:
            _make(folder, below)
        copied = [file for file in files if not _kept(file, _within(file.folder, below) / file.path.name, linkless)]
        for folder in folders:
            for depth in (below, *below.parents):
                _named("writing", folder, depth, folder.files.sync_folder)
    except BaseException:
        for folder in folders:
            with contextlib.suppress(OSError):
                remove_files(folder.files, _within(folder, below), len(below.parents) - 1)
        raise
    if copied and any(file.folder not in linkless for file in copied):
        log.warning("%d files of optimizer states were copied, since they can have no further names", len(copied))
    return [_pieces(one, below) for one in stored]


def remove_files(files: Files, folder: Path, n_above: int = 0) -> None:
    """Remove a folder that has only files, and some folders above it that have nothing else.

    Raises: OSError if the system refuses.
    """
    for name in files.names(folder):
        files.unlink(folder / name)
    files.remove_folder(folder)
    for above in folder.parents[:n_above]:
        if files.names(above):
            return
        files.remove_folder(above)


def _part(stored: Stored, files: list[StoredFile]) -> None:
    """Let nobody write to these files any more, neither through memory nor through the engine."""
    edited = [chunk for chunk in range(len(stored.chunks)) if stored.was_edited(chunk)]
    if edited:
        raise StorageError(
            f"{stored.name} was written to in memory, and the file that an earlier checkpoint keeps was not told; "
            "no checkpoint is made, since it would lose that"
        )
    with interrupts.held():
        if isinstance(stored.shown, Showing):
            stored.shown.part_from(files)
        stored.places.keep(files)


def _sync(files: Sequence[StoredFile]) -> None:
    for file in files:
        opened = file.open()
        try:
            opened.sync()
        finally:
            opened.close()


def _within(folder: Folder, below: PurePath) -> Path:
    return folder.folder / below


def _make(folder: Folder, below: PurePath) -> None:
    for depth in (*reversed(below.parents), below):
        _named("making", folder, depth, folder.files.make_folder)


def _named(doing: str, folder: Folder, below: PurePath, call: Callable[[Path], None]) -> None:
    path = _within(folder, below)
    try:
        call(path)
    except OSError as error:
        raise failed(doing, path, error) from error


def _kept(file: StoredFile, new: Path, linkless: set[Folder]) -> bool:
    """Give a file a second name, or copy it there; return whether it was a name."""
    if file.folder not in linkless:
        try:
            file.folder.files.link(file.path, new)
            return True
        except OSError as error:
            if error.errno not in LINKLESS:
                raise failed(f"linking {file.path} as", new, error) from error
    _copy(file, new)
    return False


def _copy(file: StoredFile, new: Path) -> None:
    source, memory = file.open(), AlignedBytes(_COPY_BYTES)
    try:
        target = _new(file, new)
        try:
            for start in range(0, file.n_bytes, _COPY_BYTES):
                n_bytes = min(_COPY_BYTES, file.n_bytes - start)
                source.read(memory.address, n_bytes, start, n_bytes)
                target.write(memory.address, n_bytes, start)
            target.sync()
        finally:
            target.close()
    finally:
        source.close()


def _new(file: StoredFile, path: Path) -> OpenFile:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if file.folder.direct else 0)
    try:
        return OpenFile(file.folder.files, path, file.folder.files.open(path, flags), file.folder.direct)
    except OSError as error:
        raise failed("making", path, error) from error


def _pieces(stored: Stored, below: PurePath) -> list[Piece]:
    found = []
    for chunk, (file, offset) in enumerate(stored.places):
        first, last = stored.chunks.range_of(chunk)
        expected = stored.written(chunk)[1]
        if expected is None:
            raise StorageError(
                f"bytes {first} to {last} of {stored.name} were written in memory while a checkpoint was made; save it "
                "again when nobody writes"
            )
        path = _within(file.folder, below) / file.path.name
        found.append(Piece(path, offset, first, last - first, expected))
    return found
