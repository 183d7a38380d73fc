"""Files of the user's that are only read: checkpoints in the safetensors format."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import StorageError
from .checksums import checksum
from .files import Files
from .host_bytes import ALIGNMENT_BYTES, AlignedBytes, copy, round_down, round_up
from .open_file import OpenFile, failed, open_to_read
from .transfers import Part, Queue, Request, Worker

_LENGTH_BYTES = 8  # of the number at the beginning that says how long the header is
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit


Submit = Callable[[list[Part]], None]


@dataclass(frozen=True)
class _Identity:
    """What tells whether a file is still the one that was opened."""

    size_bytes: int
    mtime_ns: int
    place: tuple[int, int]
    header: int


class ReadOnlyFile:
    """A safetensors file, open for reads of any range of bytes, which must not change meanwhile.

    State: `_checksums` by range of a request, noted when it is first read; a range belongs to one thread at a time.

    Parameters
    ----------
    path: of the file. request_bytes: the most that one request reads. queue_of: finds the threads of the file's disk.
    submit: has the requests of parts done before all others.

    Raises: StorageError if it cannot be opened, or is not in the safetensors format.
    """

    def __init__(
        self, files: Files, path: Path, request_bytes: int, queue_of: Callable[[Path], Queue], submit: Submit
    ) -> None:
        self.path = path
        self._files, self._request_bytes, self._submit = files, request_bytes, submit
        self._checksums: dict[tuple[int, int], int] = {}
        self._file = open_to_read(files, path)
        try:
            self._opened_as = self._identity(self._file.stat())
            self._queue = queue_of(path)
        except OSError as error:
            self.close()
            raise failed("looking at", path, error) from error
        except BaseException:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        """Return the length of the file."""
        return self._opened_as.size_bytes

    @property
    def direct(self) -> bool:
        """Return whether reads go past the page cache."""
        return self._file.direct

    def parts(self, target: torch.Tensor, start: int) -> list[Part]:
        """Return the requests that read the bytes from an offset into a tensor."""
        end = start + target.numel()
        blocks = range(round_down(start), round_up(end), self._request_bytes) if end > start else ()
        requests = [
            self._request(target, start, offset, min(self._request_bytes, round_up(end) - offset)) for offset in blocks
        ]
        return [Part(self._queue, requests, lambda: self._file, keep_open=True)]

    def check(self) -> None:
        """Look whether the file is still the one that was opened, by its size, its time and its header.

        It waits for the requests under way on the file's disk, but not for those that have not begun.

        Raises: StorageError if it is another one.
        """
        self._submit([Part(self._queue, [Request(object(), self._compare)], lambda: self._file, keep_open=True)])

    def close(self) -> None:
        """Close the file, which the engine does after its last transfer."""
        self._file.close()

    def _compare(self, worker: Worker, file: OpenFile) -> None:
        try:
            found = self._identity(self._files.stat(self.path))
        except OSError as error:
            raise failed("looking at", self.path, error) from error
        if found == self._opened_as:
            return
        was, now = self._opened_as, found
        changes = {
            "it is another file of the same name": now.place != was.place,
            f"it has {now.size_bytes} bytes and not {was.size_bytes}": now.size_bytes != was.size_bytes,
            "it was written to": now.mtime_ns != was.mtime_ns,
            "its header differs": now.header != was.header,
        }
        what = ", ".join(words for words, changed in changes.items() if changed)
        raise StorageError(
            f"{self.path} has changed since it was opened: {what}. Start again with the file as it was, and keep other "
            "programs from writing to it"
        )

    def _identity(self, found: os.stat_result) -> _Identity:
        header = self._header_checksum(found.st_size)
        return _Identity(found.st_size, found.st_mtime_ns, (found.st_dev, found.st_ino), header)

    def _header_checksum(self, size_bytes: int) -> int:
        """Return the checksum of the header and of its length."""
        first = AlignedBytes(ALIGNMENT_BYTES)
        self._file.read(first.address, first.n_bytes, 0, min(size_bytes, _LENGTH_BYTES))
        n_bytes = _LENGTH_BYTES + int.from_bytes(bytes(first.view(0, _LENGTH_BYTES)), "little")
        if size_bytes < _LENGTH_BYTES or n_bytes > min(size_bytes, _MOST_HEADER_BYTES):
            raise StorageError(
                f"{self.path} is not a safetensors file: it has {size_bytes} bytes, and its header would end at "
                f"{n_bytes}. Convert the weights with safetensors.torch.save_file, or fetch the file again"
            )
        header = AlignedBytes(round_up(n_bytes))
        self._file.read(header.address, header.n_bytes, 0, n_bytes)
        return checksum(header.address, n_bytes)

    def _request(self, target: torch.Tensor, start: int, offset: int, n_bytes: int) -> Request:
        """Return the request for one block of the file, of which the target may want a part."""
        least_bytes = min(n_bytes, self.size_bytes - offset)
        end = start + target.numel()
        whole = offset >= start and offset + n_bytes <= end

        def work(worker: Worker, file: OpenFile) -> None:
            address = target.data_ptr() + offset - start  # where the block lies, or would if the target had all of it
            straight = whole and address % ALIGNMENT_BYTES == 0
            into = address if straight else worker.buffer.address
            worker.read(file, into, n_bytes, offset, least_bytes)
            self._verify(offset, least_bytes, checksum(into, least_bytes))
            if not straight:
                first, last = max(offset, start), min(offset + least_bytes, end)
                copy(target.data_ptr() + first - start, into + first - offset, last - first)

        return Request((self, offset), work)

    def _verify(self, offset: int, n_bytes: int, found: int) -> None:
        if self._checksums.setdefault((offset, n_bytes), found) != found:
            raise StorageError(
                f"{self.path} gave other bytes than when they were first read, between offsets {offset} and "
                f"{offset + n_bytes}: something has written to the file, or the disk has a fault. Keep other programs "
                "from writing to it, compare it with its source, and start again"
            )
