"""All calls to files that the engine makes, behind one protocol, so that tests can make each of them fail."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from .addresses import put_file

Buffer = memoryview | bytearray | ctypes.Array[ctypes.c_char]


class Files(Protocol):
    """Calls to files, by handle or by path, as the system makes them: each may do less than asked, or raise OSError."""

    def open(self, path: Path, flags: int) -> int:
        """Return the handle of a file; links at its last place are followed only when it is opened for reading."""
        ...

    def close(self, handle: int) -> None: ...

    def preadv(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Read into buffers from an offset in bytes; return the number of bytes read."""
        ...

    def pwritev(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write buffers at an offset in bytes; return the number of bytes written."""
        ...

    def fallocate(self, handle: int, n_bytes: int) -> bool:
        """Reserve the first bytes of a file; return False where the file system cannot."""
        ...

    def truncate(self, handle: int, n_bytes: int) -> None: ...

    def map(self, handle: int, address: int, n_bytes: int, offset: int, shared: bool) -> None:
        """Let reserved addresses be bytes of a file from an offset; what is written there goes to it if `shared`."""
        ...

    def fdatasync(self, handle: int) -> None: ...

    def drop_cached(self, handle: int, offset: int, n_bytes: int) -> None:
        """Let the system forget its copy of a range in RAM."""
        ...

    def stat(self, path: Path) -> os.stat_result:
        """Describe a file; links are followed."""
        ...

    def fstat(self, handle: int) -> os.stat_result: ...

    def disk(self, path: Path) -> str:
        """Name the disk that a file or a folder is on; partitions of one disk have the same name."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that this process may still use on the file system of a path."""
        ...

    def names(self, folder: Path) -> list[str]: ...

    def unlink(self, path: Path) -> None: ...

    def link(self, path: Path, new: Path) -> None:
        """Give a file a second name, which must be free."""
        ...

    def make_folder(self, path: Path) -> None:
        """Make a folder unless it is there; the one that it lies in must be."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        ...

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        ...

    def lock(self, handle: int) -> None:
        """Lock a file for this process; raise BlockingIOError if another process has it."""
        ...


class SystemFiles:
    """The system's own calls."""

    def __init__(self) -> None:
        # os.posix_fallocate would write into every block where the file system cannot reserve.
        self._fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        self._fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

    def open(self, path: Path, flags: int) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        return os.open(path, flags | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0), 0o600)

    def close(self, handle: int) -> None:
        os.close(handle)

    def preadv(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.preadv(handle, buffers, offset)

    def pwritev(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(handle, buffers, offset)

    def fallocate(self, handle: int, n_bytes: int) -> bool:
        while self._fallocate(handle, 0, 0, n_bytes) != 0:
            code = ctypes.get_errno()
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                return False
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        return True

    def truncate(self, handle: int, n_bytes: int) -> None:
        os.ftruncate(handle, n_bytes)

    def map(self, handle: int, address: int, n_bytes: int, offset: int, shared: bool) -> None:
        put_file(handle, address, n_bytes, offset, shared)

    def fdatasync(self, handle: int) -> None:
        os.fdatasync(handle)

    def drop_cached(self, handle: int, offset: int, n_bytes: int) -> None:
        os.posix_fadvise(handle, offset, n_bytes, os.POSIX_FADV_DONTNEED)

    def stat(self, path: Path) -> os.stat_result:
        return os.stat(path)

    def fstat(self, handle: int) -> os.stat_result:
        return os.fstat(handle)

    def disk(self, path: Path) -> str:
        device = os.stat(path).st_dev
        name = f"{os.major(device)}:{os.minor(device)}"
        with contextlib.suppress(OSError):
            block = Path("/sys/dev/block", name).resolve(strict=True)
            return block.parent.name if (block / "partition").exists() else block.name
        return name

    def free_bytes(self, path: Path) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def link(self, path: Path, new: Path) -> None:
        os.link(path, new, follow_symlinks=False)

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def sync_folder(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def lock(self, handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
