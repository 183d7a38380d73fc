"""The safetensors files of a model: read tensor by tensor into memory, or mapped, and the digests of their content."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import OffmateError

DTYPES_IN_FILES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
METADATA = "__metadata__"
# What reading a file raises that is not what it should be; torch raises RuntimeError for sizes that cannot be.
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError)

CHUNK_BYTES = 1 << 24
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python names from 3.13 on


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights.

    Raises: OffmateError if one is missing, or if the index of the files is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except DAMAGE as error:
            raise OffmateError(
                f"{index}: the index of the weights is damaged: {type(error).__name__}: {error}"
            ) from error
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise OffmateError(f"{file}: no such file; the model's weights must be in safetensors")
    return files


def read_weights(
    folder: Path, dtype: torch.dtype, exact: list[str], digests: dict[str, str] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read a model's weights into memory of their own, one tensor after another.

    Parameters
    ----------
    dtype: of floating-point tensors. exact: parts of the names of those that keep the dtype of the file.
    digests: is filled with the SHA-256 digest of each file's content, by its place below the folder; None makes none.

    Raises: OffmateError if a file is missing or damaged.
    """
    for file in weight_files(folder):
        # A digest of all that is read finds a change of a single element, and takes about 1 s per GB on one core.
        seen = hashlib.sha256() if digests is not None else None
        try:
            yield from _read_file(file, dtype, exact, seen)
        except DAMAGE as error:
            raise _damaged(file, error) from error
        if digests is not None and seen is not None:
            digests[os.path.relpath(file, folder)] = seen.hexdigest()


def map_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Map a model's weights into memory, which reads nothing yet. Raises: OffmateError as `read_weights`."""
    found: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        try:
            found |= map_file(file)
        except DAMAGE as error:
            raise _damaged(file, error) from error
    return found


def digests_of(folder: Path, *, keep_cached: bool) -> dict[str, str]:
    """Return the digests of a model's weights that `read_weights` would make; nothing stays in memory.

    Parameters
    ----------
    keep_cached: whether the system may keep in its page cache what is read.

    Raises: OffmateError as `read_weights`.
    """
    return {os.path.relpath(file, folder): digest_of(file, keep_cached) for file in weight_files(folder)}


def digest_of(file: Path, keep_cached: bool) -> str:
    """Return the digest of one file's content. Raises: OffmateError if it is damaged."""
    seen, chunk = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    try:
        with file.open("rb", buffering=0) as source:
            begin, header = read_header(file, source)
            seen.update(json.dumps(header).encode())
            for entry in _entries(header).values():
                first, last = entry["data_offsets"]
                source.seek(begin + first)
                for start in range(first, last, CHUNK_BYTES):
                    part = chunk[: min(CHUNK_BYTES, last - start)]
                    _read_into(part, source)
                    seen.update(part)
                    if not keep_cached:
                        os.posix_fadvise(source.fileno(), begin + start, len(part), os.POSIX_FADV_DONTNEED)
    except DAMAGE as error:
        raise _damaged(file, error) from error
    return seen.hexdigest()


def map_file(file: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of a safetensors file. Raises: one of `DAMAGE` if it is not what it should be."""
    with file.open("rb") as source:
        begin, header = read_header(file, source)
        mapped = mapping_of(source, file.stat().st_size)
    return {name: _mapped(mapped, begin, entry) for name, entry in _entries(header).items()}


def mapping_of(source: BinaryIO, n_bytes: int) -> mmap.mmap:
    """Map a file such that writes stay in this process, and that the system sets no memory aside for them.

    Else it would refuse a file that is larger than its RAM.
    """
    flags, prot = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(source.fileno(), n_bytes, flags=flags, prot=prot)


def tensor_in(mapped: mmap.mmap, start: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor whose bytes begin at an offset of a mapping."""
    n = torch.Size(shape).numel()
    if not n:
        return torch.empty(shape, dtype=dtype)
    if min(shape, default=0) < 0 or start < 0 or start + n * dtype.itemsize > len(mapped):
        raise ValueError("the file ends too early")
    if start % dtype.itemsize:  # kernels expect whole elements
        own = bytearray(mapped[start : start + n * dtype.itemsize])
        return torch.frombuffer(own, dtype=dtype).view(shape)
    return torch.frombuffer(mapped, dtype=dtype, count=n, offset=start).view(shape)


def _mapped(mapped: mmap.mmap, begin: int, entry: dict[str, Any]) -> torch.Tensor:
    return tensor_in(mapped, begin + entry["data_offsets"][0], entry["shape"], DTYPES_IN_FILES[entry["dtype"]])


def entries_of(file: Path) -> dict[str, Any]:
    """Return what a file says of every tensor: dtype, shape and place. Raises: one of `DAMAGE`."""
    with file.open("rb", buffering=0) as source:
        return _entries(read_header(file, source)[1])


def read_header(file: Path, source: Any) -> tuple[int, dict[str, Any]]:
    """Return where a file's data begin, and what its header says. Raises: one of `DAMAGE`."""
    size = int.from_bytes(source.read(8), "little")
    if size > file.stat().st_size:
        raise ValueError("the header is longer than the file")
    return 8 + size, json.loads(source.read(size))


def _entries(header: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in header.items() if name != METADATA}


def _read_file(file: Path, dtype: torch.dtype, exact: list[str], seen: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Read a file without mapping it: mapped pages count as process memory, and a conversion would touch them all."""
    with file.open("rb", buffering=0) as source:
        begin, header = read_header(file, source)
        if seen is not None:
            seen.update(json.dumps(header).encode())
        for name, entry in _entries(header).items():
            stored = DTYPES_IN_FILES[entry["dtype"]]
            keep = not stored.is_floating_point or any(part in exact for part in name.split("."))
            tensor = torch.empty(entry["shape"], dtype=stored if keep else dtype)
            source.seek(begin + entry["data_offsets"][0])
            _fill(tensor, stored, source, seen)
            yield name, tensor


def _fill(tensor: torch.Tensor, stored: torch.dtype, source: Any, seen: Any) -> None:
    flat = tensor.view(-1)
    per_chunk = CHUNK_BYTES // stored.itemsize
    for start in range(0, flat.numel(), per_chunk):
        part = flat[start : start + per_chunk]
        same = part.dtype == stored
        chunk = part if same else torch.empty(part.shape, dtype=stored)
        view = bytes_of(chunk)
        _read_into(view, source)
        if seen is not None:
            seen.update(view)
        if not same:
            part.copy_(chunk)


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of one dimension."""
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _read_into(view: memoryview, source: Any) -> None:
    done = 0
    while done < len(view):
        got = source.readinto(view[done:])
        if not got:
            raise ValueError("the file ends too early")
        done += got


def _damaged(file: Path, error: Exception) -> OffmateError:
    return OffmateError(f"{file}: the weights are damaged: {error}")
