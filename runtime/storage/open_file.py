"""One open file: whole requests out of calls that may do less than asked, and errors with the place and a remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from ...errors import StorageError
from .files import Files
from .host_bytes import ALIGNMENT_BYTES, AlignedBytes, round_down, view

_REMEDIES = {
    errno.EIO: "the disk or its connection has a fault: look at the system's log (dmesg), and use another disk",
    errno.ENOSPC: "free space there, or name another folder",
    errno.EDQUOT: "your quota there is used up: free space, or name another folder",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f unlimited), or use another file system",
    errno.EMFILE: "raise the limit on open files (ulimit -n 65536)",
    errno.EACCES: "change its permissions, or name another folder",
    errno.EROFS: "the file system can only be read: name another folder",
    errno.ENOENT: "it was there before: keep other programs out of the folder, and start again",
    errno.ENOMEM: "raise the limits on addresses (ulimit -v unlimited) and on mappings (sysctl vm.max_map_count)",
    errno.ESTALE: "the server of the file system has lost the file: use a local disk",
}
_ELSEWHERE = "check the disk, or name another folder"
REFUSES_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
"""Errors of a file system that has no O_DIRECT, or one of larger blocks."""


class OpenFile:
    """A file that requests are made to.

    Parameters
    ----------
    handle: of the open file. direct: whether it is open with O_DIRECT. If not, the system's copy of each request in RAM
        is dropped after it, so that files take no RAM beyond the engine's own either way.
    """

    def __init__(self, files: Files, path: Path, handle: int, direct: bool) -> None:
        self.path, self.direct = path, direct
        self._files, self._handle = files, handle

    def read(
        self, address: int, n_bytes: int, offset: int, least_bytes: int, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Read one request into memory.

        Parameters
        ----------
        address, n_bytes, offset: of memory and file, aligned. least_bytes: how many of the bytes must be there; less
            than `n_bytes` where the file ends. progress: called after each call to the system that did something.

        Raises: StorageError if the system refuses, or if the file ends before.
        """

        def call(start: int, length: int) -> int:
            return self._files.preadv(self._handle, [view(address + start, length)], offset + start)

        self._whole("reading", call, n_bytes, offset, least_bytes, progress)
        if not self.direct:
            self._named("reading", offset, lambda: self._files.drop_cached(self._handle, offset, n_bytes))

    def write(self, address: int, n_bytes: int, offset: int, progress: Callable[[], None] = lambda: None) -> None:
        """Write one request from memory; parameters and errors are as in `read`."""

        def call(start: int, length: int) -> int:
            return self._files.pwritev(self._handle, [view(address + start, length)], offset + start)

        self._whole("writing", call, n_bytes, offset, n_bytes, progress)
        if not self.direct:  # what has not reached the disk cannot be dropped
            self._named("writing", offset, lambda: self._files.fdatasync(self._handle))
            self._named("writing", offset, lambda: self._files.drop_cached(self._handle, offset, n_bytes))

    def reserve(self, n_bytes: int) -> bool:
        """Take space on the disk for the first bytes of the file; return False where the file system cannot.

        Raises: StorageError if it refuses, mostly for want of space.
        """
        try:
            return self._files.fallocate(self._handle, n_bytes)
        except OSError as error:
            raise failed("reserving space for", self.path, error) from error

    def map(self, address: int, n_bytes: int, offset: int, shared: bool = True) -> None:
        """Let reserved addresses be bytes of the file; parameters are as in `read` and in `put_file`.

        Raises: StorageError if the system refuses.
        """
        self._named("mapping", offset, lambda: self._files.map(self._handle, address, n_bytes, offset, shared))

    def sync(self) -> None:
        """Wait until all that was written is on the disk. Raises: StorageError if it cannot be kept."""
        self._named("writing", 0, lambda: self._files.fdatasync(self._handle))

    def stat(self) -> os.stat_result:
        """Describe the open file, whatever its name stands for since it was opened."""
        return self._files.fstat(self._handle)

    def close(self) -> None:
        """Close the file. Raises: StorageError if the system cannot keep what was written."""
        try:
            self._files.close(self._handle)
        except OSError as error:
            raise failed("closing", self.path, error) from error

    def _whole(
        self,
        doing: str,
        call: Callable[[int, int], int],
        n_bytes: int,
        offset: int,
        least_bytes: int,
        progress: Callable[[], None],
    ) -> None:
        """Call again from where the last call stopped, until enough is done."""
        start = 0
        while True:
            try:
                done = start + call(start, n_bytes - start)
            except InterruptedError:
                continue
            except OSError as error:
                raise failed(doing, self.path, error, offset + start) from error
            progress()
            if done >= least_bytes:
                return
            # Past the page cache, only aligned bytes can be asked for.
            again = round_down(done) if self.direct else done
            if again == start:
                raise self._stopped(doing, offset, done, least_bytes)
            start = again

    def _stopped(self, doing: str, offset: int, done: int, least_bytes: int) -> StorageError:
        what = "ends there" if doing == "reading" else "takes no more bytes"
        return StorageError(
            f"{doing} {self.path} stopped at offset {offset + done}, {least_bytes - done} bytes before the end of the "
            f"request: the file {what}, though the system reports no error. Keep other programs away from the file, "
            f"and check that its file system works with requests of {ALIGNMENT_BYTES} bytes"
        )

    def _named(self, doing: str, offset: int, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            raise failed(doing, self.path, error, offset) from error


def open_to_read(files: Files, path: Path) -> OpenFile:
    """Open a file past the page cache if its file system can read so, else through it.

    Raises: StorageError if it cannot be opened or read.
    """
    try:
        file = OpenFile(files, path, files.open(path, os.O_RDONLY | os.O_DIRECT), direct=True)
    except OSError as error:
        if error.errno not in REFUSES_DIRECT:
            raise failed("opening", path, error) from error
        return _open_through_cache(files, path)
    try:
        memory = AlignedBytes(ALIGNMENT_BYTES)
        file.read(memory.address, memory.n_bytes, 0, 0)
    except StorageError as error:
        file.close()
        if not refuses_direct(error):
            raise
        return _open_through_cache(files, path)
    return file


def _open_through_cache(files: Files, path: Path) -> OpenFile:
    try:
        return OpenFile(files, path, files.open(path, os.O_RDONLY), direct=False)
    except OSError as error:
        raise failed("opening", path, error) from error


def refuses_direct(error: StorageError) -> bool:
    """Return whether a request failed because the file system has no way past the page cache."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in REFUSES_DIRECT


def failed(doing: str, path: Path, error: OSError, offset: int | None = None) -> StorageError:
    """Return what to raise for a call that the system refused: doing what, where, why, and what to try."""
    why = os.strerror(error.errno) if error.errno else str(error)
    where = "" if offset is None else f" at offset {offset}"
    remedy = _REMEDIES.get(error.errno or 0, _ELSEWHERE)
    return StorageError(f"{doing} {path}{where} failed: {why}; {remedy}")
