"""Folders that the engine stores in: one process each, and nobody's files but offmate's own are touched."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import secrets
import threading
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ArgumentTypeError, ArgumentValueError, StorageError
from ...sizes import format_bytes
from .files import Files
from .host_bytes import ALIGNMENT_BYTES, AlignedBytes
from .open_file import REFUSES_DIRECT, OpenFile, failed, refuses_direct
from .path_rates import path_rates

MARKER = ".offmate-storage"
"""The file in a folder that is locked while an engine stores there, and that says which files are the engine's."""
_MARKER_BYTES = 200  # more than its text has
_MARKER_TEXT = re.compile(rb"offmate stores here: process (\d+), files offmate-([0-9a-f]{16})-\*\.tensor\n")
_FULL = (errno.ENOSPC, errno.EDQUOT)
LINKLESS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system that gives a file no second name, or no further one."""


@dataclass(frozen=True)
class StoragePath:
    """A folder that tensors are stored in while a model trains.

    Parameters
    ----------
    folder: it must exist. Each one is on a disk of its own. read, write: the disk's rates, in bytes per second or as
        text such as "3GB/s"; None if they are to be measured. both: the rate of reads and writes together, as many
        bytes of each; None for that of a disk on which they take turns.
    parameters: whether trained parameters may lie there, too, where RAM has no room for their values. They do so only
        if all paths have it.

    Raises: ArgumentTypeError, ArgumentValueError for a folder or a rate that is none, for a rate below 1 MiB per
    second, and if only one of `read` and `write` is given.
    """

    folder: str | os.PathLike[str]
    read: float | str | None = None
    write: float | str | None = None
    both: float | str | None = None
    parameters: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike):
            kind = type(self.folder).__name__
            raise ArgumentTypeError(f"folder={self.folder!r} is a {kind}; give the path of a folder as text or Path")
        if not str(os.fspath(self.folder)).strip():
            raise ArgumentValueError(f"folder={self.folder!r} names no folder; give one such as '/mnt/nvme/offmate'")
        _ = self.rates

    @property
    def rates(self) -> tuple[float, float, float] | None:
        """Return the rates of reads, of writes and of both together, in bytes per second; None if none are given."""
        return path_rates(os.fspath(self.folder), self.read, self.write, self.both)


class Folder:
    """A folder that this process stores in.

    Its marker is locked until `close`, however the process ends, and names the files that are the engine's. Files that
    a killed process has left are removed when the folder is opened again.

    State: `_made`, the files that were made, `fills`, and `_closed`; a file is made, and the folder closed, under
    `_lock`. `fills` says whether a file was written once when it was made, since the file system cannot reserve space.

    Parameters
    ----------
    folder: it must exist. fill_bytes: how many bytes are written at once where the file system cannot reserve space.

    Raises: StorageError if it is missing, cannot be written to, or is in use by another process, which is named.
    """

    def __init__(self, files: Files, folder: Path, fill_bytes: int) -> None:
        self.folder, self._files, self._fill_bytes = folder, files, fill_bytes
        self._made: dict[Path, None] = {}  # files may be removed on any thread
        self._number, self._closed, self._lock = 0, False, threading.RLock()
        self.fills = False
        self._run = secrets.token_hex(8)
        self._marker = self._locked()
        try:
            if (left_by := self._left_by()) is not None:
                self._remove_files_of(left_by)
            self._mark()
            self.direct = self._tried()
        except BaseException:
            self._files.close(self._marker)  # the lock goes with it, and the marker stays for the next one
            raise

    def reserve(self, n_bytes: int) -> Path:
        """Make a file, and take its space on the disk.

        Raises: StorageError if there is too little space, or if the folder was closed.
        """
        with self._lock:
            if self._closed:
                raise StorageError(f"nothing more is stored in {self.folder}, since its engine was closed")
            return self._reserved(n_bytes)

    def _reserved(self, n_bytes: int) -> Path:
        self._number += 1
        path = self.folder / f"offmate-{self._run}-{self._number:06}.tensor"
        self._made[path] = None
        file = self._open(path, os.O_CREAT | os.O_EXCL, direct=self.direct)
        try:
            if not file.reserve(n_bytes):
                self.fills = True
                self._fill(file, path, n_bytes)
        except StorageError as error:
            file.close()
            self.remove(path)
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
                raise self._too_full(path, n_bytes, os.strerror(error.__cause__.errno)) from error
            raise
        file.close()
        return path

    @property
    def free_bytes(self) -> int:
        """Return the bytes that may still be taken there; none if the system does not say."""
        try:
            return self._files.free_bytes(self.folder)
        except OSError:
            return 0

    def open(self, path: Path) -> OpenFile:
        """Open a file that was reserved. Raises: StorageError if it has gone."""
        return self._open(path, 0, self.direct)

    @property
    def files(self) -> Files:
        """Return the calls to the folder's files."""
        return self._files

    def why_no_links(self) -> str | None:
        """Return why the file system gives no file a second name; None if it does. Raises: StorageError if it fails."""
        paths = [self.folder / f"offmate-{self._run}-{number}.tensor" for number in ("000000", "0000000")]
        try:
            self._files.close(self._files.open(paths[0], os.O_RDWR | os.O_CREAT))
            self._files.link(*paths)
            return None
        except OSError as error:
            if error.errno not in LINKLESS:
                raise failed("trying a hard link in", self.folder, error) from error
            return os.strerror(error.errno)
        finally:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(path)

    def remove(self, path: Path) -> None:
        """Remove a file that was reserved. Raises: StorageError if it cannot be removed."""
        try:
            self._files.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise failed("removing", path, error) from error
        self._made.pop(path, None)

    def close(self) -> None:
        """Remove the engine's files and unlock the folder. Raises: StorageError if a file cannot be removed."""
        try:
            with self._lock:
                self._closed = True
            for path in tuple(self._made):
                self.remove(path)
            self._files.unlink(self.folder / MARKER)
        except OSError as error:
            raise failed("removing", self.folder / MARKER, error) from error
        finally:
            self._files.close(self._marker)

    def _open(self, path: Path, flags: int, direct: bool) -> OpenFile:
        try:
            handle = self._files.open(path, os.O_RDWR | flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            raise failed("opening", path, error) from error
        return OpenFile(self._files, path, handle, direct)

    def _locked(self) -> int:
        """Return the handle of the marker, which is locked."""
        path, collected = self.folder / MARKER, False
        while True:
            try:
                handle = self._files.open(path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise self._unusable(error) from error
            try:
                self._files.lock(handle)
                # Who had the lock may have removed the file, and another process may have made a new one meanwhile.
                if os.path.samestat(self._files.fstat(handle), self._files.stat(path)):
                    return handle
            except BlockingIOError:
                owner = self._owner(handle)
                if collected or owner != os.getpid():
                    self._files.close(handle)
                    raise StorageError(self._in_use(owner)) from None
                # A model that nobody holds any more may live on in a cycle of references, and its engine with it.
                gc.collect()
                collected = True
            except FileNotFoundError:
                pass
            except OSError as error:
                self._files.close(handle)
                raise failed("locking", path, error) from error
            self._files.close(handle)

    def _unusable(self, error: OSError) -> StorageError:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            if self.folder.is_dir():
                return StorageError(f"{self.folder} cannot be stored in: its file system makes no files; name another")
            return StorageError(f"{self.folder} is not a folder; make it, or name another one")
        if error.errno in _FULL:
            return self._too_full(self.folder / MARKER, _MARKER_BYTES, os.strerror(error.errno))
        return StorageError(
            f"{self.folder} cannot be stored in: {os.strerror(error.errno or 0)}; name a folder that you may write to"
        )

    def _owner(self, handle: int) -> int | None:
        """Return which process the marker names."""
        text = _MARKER_TEXT.fullmatch(self._marker_text(handle))
        return int(text[1]) if text else None

    def _in_use(self, owner: int | None) -> str:
        if owner == os.getpid():
            return (
                f"another model of this process stores in {self.folder}; delete that model and its optimizer, or name "
                "another folder"
            )
        if owner is not None and not _runs(owner):
            return (
                f"process {owner}, which stored in {self.folder}, has ended, but one that it started still runs and "
                "holds the folder; end that one, or name another folder"
            )
        who = "another process" if owner is None else f"process {owner}"
        return f"{who} stores in {self.folder}; wait until it has ended, or name another folder"

    def _marker_text(self, handle: int) -> bytes:
        text = bytearray(_MARKER_BYTES)
        try:
            return bytes(text[: self._files.preadv(handle, [text], 0)])
        except OSError as error:
            raise failed("reading", self.folder / MARKER, error) from error

    def _left_by(self) -> str | None:
        """Return which run's files an engine has left here that was killed; None if none was."""
        text = self._marker_text(self._marker)
        if not text:
            return None
        known = _MARKER_TEXT.fullmatch(text)
        if known is None:
            raise StorageError(
                f"{self.folder / MARKER} is not a file of offmate's; move it away, or name another folder"
            )
        return known[2].decode()

    def _remove_files_of(self, run: str) -> None:
        own = re.compile(rf"offmate-{run}-\d+\.tensor")
        try:
            for name in self._files.names(self.folder):
                if own.fullmatch(name):
                    self._files.unlink(self.folder / name)
        except OSError as error:
            raise failed("removing files of an earlier run from", self.folder, error) from error

    def _mark(self) -> None:
        text = f"offmate stores here: process {os.getpid()}, files offmate-{self._run}-*.tensor\n".encode()
        try:
            self._files.truncate(self._marker, 0)
            if self._files.pwritev(self._marker, [bytearray(text)], 0) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._files.fdatasync(self._marker)
        except OSError as error:
            raise self._unusable(error) from error

    def _tried(self) -> bool:
        """Return whether the file system of the folder reads and writes past the page cache."""
        path = self.folder / f"offmate-{self._run}-000000.tensor"
        page = AlignedBytes(ALIGNMENT_BYTES)
        try:
            try:
                handle = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
            except OSError as error:
                if error.errno in REFUSES_DIRECT:
                    return False
                raise self._unusable(error) from error
            file = OpenFile(self._files, path, handle, direct=True)
            try:
                file.write(page.address, page.n_bytes, 0)
                file.read(page.address, page.n_bytes, 0, page.n_bytes)
            except StorageError as error:
                if not refuses_direct(error):
                    raise
                return False
            finally:
                file.close()
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(path)
        return True

    def _fill(self, file: OpenFile, path: Path, n_bytes: int) -> None:
        """Write a file once, so that its space is taken."""
        if self._files.free_bytes(self.folder) < n_bytes:
            raise self._too_full(path, n_bytes, "the file system cannot reserve space")
        pattern = AlignedBytes(self._fill_bytes)
        # Zeros, or the same bytes again and again, would take no space where the file system compresses.
        for start in range(0, n_bytes, self._fill_bytes):
            length = min(self._fill_bytes, n_bytes - start)
            pattern.fill(os.urandom(length))
            file.write(pattern.address, length, start)

    def _too_full(self, path: Path, n_bytes: int, why: str) -> StorageError:
        try:
            free = format_bytes(self._files.free_bytes(self.folder))
        except OSError:
            free = "an unknown number of bytes"
        return StorageError(
            f"{path} needs {format_bytes(n_bytes)}, and {free} are free in {self.folder} ({why}); free space there, or "
            "name a folder on a larger disk"
        )


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        pass
    return True
