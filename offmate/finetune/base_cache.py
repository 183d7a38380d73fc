"""Parameters of a base that no file of its checkpoint has as they are, written once to a file of their own.

These are weights in another dtype, and those that transformers joins from several tensors, such as experts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import OffmateError
from ..files import draft_beside, reason
from ..sizes import format_bytes
from .folders import sync_folder
from .lock import locked
from .weight_files import (
    CHUNK_BYTES,
    DAMAGE,
    DTYPES_IN_FILES,
    METADATA,
    bytes_of,
    map_file,
    mapping_of,
    read_header,
    tensor_in,
)

log = logging.getLogger("offmate")

_FOLDER, _FILE = "offmate-base-", "base.safetensors"
_FORMAT = 1
_KEPT = "offmate"  # the key of what the file says of itself
_PADDING = "padding"
_ALIGNMENT_BYTES = 4096  # at which a tensor begins, so that it is read in whole blocks
_LENGTH_BYTES = 8  # of the number that says how long the header is
_HEADER_BYTES = 512  # of the header for each tensor of the checkpoint
_NAMES = {dtype: name for name, dtype in DTYPES_IN_FILES.items()}


def has_room(place: Path, n_bytes: int) -> bool:
    """Return whether a folder's disk has room for a file of this size, or already has one that may be it."""
    return any(place.glob(f"{_FOLDER}*/{_FILE}")) or shutil.disk_usage(place).free >= n_bytes


@dataclass(frozen=True)
class Cached:
    """What a cache holds.

    Parameters
    ----------
    tensors: by the parameter's name, mapped from the file. sources: the checkpoint's tensors that they were made from.
    """

    tensors: Mapping[str, torch.Tensor]
    sources: frozenset[str]


@dataclass(frozen=True)
class BaseCache:
    """A folder with such a file, which belongs to one base.

    Parameters
    ----------
    folder: named after what decides the content.
    """

    folder: Path

    @classmethod
    def of(cls, place: Path, digests: Mapping[str, str], dtype: torch.dtype, made_by: str) -> BaseCache:
        """Return the cache of a base.

        Parameters
        ----------
        place: the folder that it lies in. digests: of the content of the checkpoint's files. dtype: of the run.
        made_by: the class of the model and the version of the library that joins tensors.
        """
        known = json.dumps([_FORMAT, sorted(digests.items()), str(dtype), made_by])
        return cls(place / f"{_FOLDER}{hashlib.sha256(known.encode()).hexdigest()[:16]}")

    @property
    def file(self) -> Path:
        """The file."""
        return self.folder / _FILE

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs from writing this cache during the body, and remove what a killed one has left.

        Raises: OffmateError if another run writes it, or if the folder cannot be made.
        """
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise OffmateError(f"{self.folder} cannot be made: {reason(error)}; name another --storage") from error
        try:
            with locked(self.folder):
                for draft in self.folder.glob(f".{_FILE}.*.tmp"):
                    draft.unlink(missing_ok=True)
                yield
        finally:
            with contextlib.suppress(OSError):  # it holds the file
                self.folder.rmdir()

    def read(self) -> Cached | None:
        """Return what the file holds, after its content is compared with its digest; None if there is no such file.

        A damaged file is said and counts as none.
        """
        if not self.file.is_file():
            return None
        try:
            with self.file.open("rb", buffering=0) as source:
                header = read_header(self.file, source)[1]
            kept = json.loads(header[METADATA][_KEPT])
            if _digest_of(self.file) != kept["digest"]:
                raise ValueError("its content is not what was written")
            tensors = {n: t for n, t in map_file(self.file).items() if not n.startswith(f"{_PADDING}.")}
            return Cached(tensors, frozenset(kept["sources"]))
        except DAMAGE as error:
            log.warning("%s is damaged (%s), so it is written again", self.file, error)
            return None

    @contextlib.contextmanager
    def writing(self, most_bytes: int, n_sources: int) -> Iterator[Writer]:
        """Yield what writes the file, which appears when the body ends well and has written a tensor.

        Parameters
        ----------
        most_bytes: more than all its tensors can have. n_sources: the number of the checkpoint's tensors.

        Raises: OffmateError if it cannot be written.
        """
        draft: Path | None = None
        try:
            with _explained(self.file):
                draft = draft_beside(self.file)
                opened = draft.open("r+b", buffering=0)
            with opened:
                writer = Writer(opened, self.file, most_bytes, n_sources)
                yield writer
                if not writer.n_bytes:
                    return
                writer.finish()
            with _explained(self.file):
                os.replace(draft, self.file)
                sync_folder(self.folder)
        finally:
            if draft is not None:
                draft.unlink(missing_ok=True)


@dataclass
class Writer:
    """Writes tensors to a file, one after another, and gives each of them back as it is mapped from there.

    State: `_entries`, what was written; `_end`, where the data end; `_digest`, of the data so far; `sources`;
    `_mapping`, of the whole file, whose last part will be cut off; `n_bytes`, of all tensors.

    Parameters
    ----------
    file: empty. path: the name that it will have. most_bytes, n_sources: as in `BaseCache.writing`.
    """

    file: BinaryIO
    path: Path
    most_bytes: int
    n_sources: int
    sources: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._begin = _up((self.n_sources + 8) * _HEADER_BYTES)
        self._end, self._entries, self._digest = self._begin, dict[str, dict[str, Any]](), hashlib.sha256()
        self.n_bytes = 0
        with _explained(self.path):
            # What was not written to takes no space on the disk.
            self.file.truncate(self._begin + self.most_bytes + (self.n_sources + 8) * _ALIGNMENT_BYTES)
            self._mapping = mapping_of(self.file, os.fstat(self.file.fileno()).st_size)

    def write(self, name: str, tensor: torch.Tensor, sources: frozenset[str]) -> torch.Tensor:
        """Write a tensor, and return it as it lies in the file.

        Parameters
        ----------
        sources: the checkpoint's tensors that it was made from.

        Raises: OffmateError if it cannot be written.
        """
        start = _up(self._end)
        with _explained(self.path):
            if start > self._end:
                self._append(f"{_PADDING}.{len(self._entries)}", torch.zeros(start - self._end, dtype=torch.uint8))
            self._append(name, tensor)
        self.n_bytes += tensor.nbytes
        self.sources |= sources
        return tensor_in(self._mapping, start, list(tensor.shape), tensor.dtype)

    def _append(self, name: str, tensor: torch.Tensor) -> None:
        own = bytes_of(tensor.detach().contiguous().view(-1))
        self.file.seek(self._end)
        for start in range(0, len(own), CHUNK_BYTES):
            part, done = own[start : start + CHUNK_BYTES], 0
            while done < len(part):
                done += self.file.write(part[done:])
            self._digest.update(part)
        first = self._end - self._begin
        self._entries[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, first + len(own)],
        }  # fmt: skip
        self._end += len(own)

    def finish(self) -> None:
        """Write the header, and wait until all is on the disk. Raises: OffmateError if that fails."""
        with _explained(self.path):
            self._finish()

    def _finish(self) -> None:
        self.file.truncate(self._end)
        sources = sorted(self.sources)
        self._digest.update(json.dumps([self._entries, sources]).encode())
        kept = {"digest": self._digest.hexdigest(), "sources": sources}
        header = json.dumps({METADATA: {"format": "pt", _KEPT: json.dumps(kept)}, **self._entries}).encode()
        room = self._begin - _LENGTH_BYTES
        if len(header) > room:
            raise OSError(f"the header needs {format_bytes(len(header))}, and has {format_bytes(room)}")
        self.file.seek(0)
        self.file.write(room.to_bytes(_LENGTH_BYTES, "little") + header.ljust(room))
        os.fsync(self.file.fileno())
        os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # training reads past the page cache


@contextlib.contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Turn a failure of the system to write a file into a sentence."""
    try:
        yield
    except OSError as error:
        raise OffmateError(
            f"{file} cannot be written: {reason(error)}; it takes the parameters of the base that the checkpoint does "
            "not have as the run uses them. Free space there, or name another --storage"
        ) from error


def _digest_of(file: Path) -> str:
    """Return the digest that `Writer` makes: of a file's data, and of what its header says of the tensors.

    Raises: KeyError, ValueError if the header does not say it.
    """
    seen, chunk = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    with file.open("rb", buffering=0) as source:
        begin, header = read_header(file, source)
        source.seek(begin)
        while got := source.readinto(chunk):
            seen.update(chunk[:got])
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    sources = json.loads(header.pop(METADATA)[_KEPT])["sources"]
    seen.update(json.dumps([header, sources]).encode())
    return seen.hexdigest()


def _up(offset: int) -> int:
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
