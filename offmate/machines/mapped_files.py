"""Tensors whose memory is a part of a file, mapped into the process, and whether the process has changed it."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ..runtime.devices.pinned import flat_bytes
from ..runtime.torch_names.tensors import storage_key

_ADDRESSES, _MAPPINGS = Path("/proc/self/maps"), Path("/proc/self/smaps")  # the latter with what has been written to
_MAPPING = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(/.*)?$")
_FIELD = re.compile(rb"(\w+): +(\d+) kB$")
_OWN_PAGES = (b"Anonymous", b"Swap")  # of a private mapping: the pages that the process has written to
_DELETED = b" (deleted)"
_COMPARED_BYTES = 1 << 24  # at once


class MappedBytes(NamedTuple):
    """The bytes of a tensor in a file: its path, the offset of the first one, and their number."""

    path: Path
    start: int
    n_bytes: int


class _Mapping(NamedTuple):
    """A mapping of a file into the process: addresses, the file's offset at the first, and whether all is unchanged."""

    first: int
    end: int
    path: Path
    offset: int
    unchanged: bool


def lists_mappings() -> bool:
    """Return whether the system says which memory is mapped from files."""
    return _MAPPINGS.is_file()


def mapped_bytes(tensors: Mapping[str, torch.Tensor]) -> dict[str, MappedBytes]:
    """Find the tensors that are mapped from a file and have its values, byte for byte.

    A mapping that the process has not written to is unchanged, as the kernel counts. Where it has, the tensor's memory
    is compared with the file.

    Parameters
    ----------
    tensors: on the CPU, by name.

    Returns: their bytes in files, by name; without those in memory of their own, those with gaps, and empty ones.
    """
    flats = {name: flat_bytes(tensor.detach()) for name, tensor in tensors.items() if _is_plain(tensor)}
    dense = {name: flat for name, flat in flats.items() if flat is not None}
    # What has been written to takes the system some 50 ms to say, and most models lie in memory of their own.
    if not dense or not _around(dense, _mappings(_ADDRESSES)):
        return {}
    found = {}
    for name, mapping in _around(dense, _mappings(_MAPPINGS)).items():
        flat = dense[name]
        own = MappedBytes(mapping.path, mapping.offset + flat.data_ptr() - mapping.first, flat.numel())
        if mapping.unchanged or _equals_file(flat, own):
            found[name] = own
    return found


def is_unchanged(tensor: torch.Tensor, own: MappedBytes) -> bool:
    """Return whether a tensor that was mapped from a file still has the file's values."""
    return mapped_bytes({"": tensor}) == {"": own}


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of memory that tensors on the CPU have, without that of mapped files.

    Pages of mapped files are free memory to the system, which can drop them at once. Memory that several tensors share
    counts once.
    """
    own = (t for t in tensors if t.device.type == "cpu" and t.layout == torch.strided)
    storages = {str(storage_key(one)): one for one in (tensor.untyped_storage() for tensor in own) if one.nbytes()}
    flats = {key: torch.empty(0, dtype=torch.uint8).set_(one) for key, one in storages.items()}
    mapped = _around(flats, _mappings(_ADDRESSES)) if flats else {}
    return sum(one.nbytes() for key, one in storages.items() if key not in mapped)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are those of its memory, on the CPU, as they lie there."""
    kind = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    lies = kind and tensor.layout == torch.strided and not tensor.is_neg() and not tensor.is_conj()
    return lies and tensor.device.type == "cpu" and tensor.numel() > 0


def _around(flats: Mapping[str, torch.Tensor], mappings: Iterable[_Mapping]) -> dict[str, _Mapping]:
    """Return of the tensors that lie whole in one of some mappings which mapping it is."""
    mappings = list(mappings)
    firsts = [mapping.first for mapping in mappings]
    found = {name: bisect_right(firsts, flat.data_ptr()) - 1 for name, flat in flats.items()}
    return {
        name: mappings[at]
        for name, at in found.items()
        if at >= 0 and flats[name].data_ptr() + flats[name].numel() <= mappings[at].end
    }


def _mappings(listed: Path) -> Iterator[_Mapping]:
    """Yield the mappings of files that still exist, in the order of their addresses; none if the system lists none."""
    try:
        lines = listed.read_bytes().splitlines()
    except OSError:
        return
    match: re.Match[bytes] | None = None
    unchanged = True
    for line in [*lines, b"0-0 ---- 0 0:0 0"]:
        field = _FIELD.match(line)
        if field is not None:
            unchanged = unchanged and not (field[1] in _OWN_PAGES and int(field[2]))
            continue
        following = _MAPPING.match(line)
        if following is None:
            continue
        if match is not None and (mapping := _mapping(match, unchanged)) is not None:
            yield mapping
        match, unchanged = following, True


def _mapping(match: re.Match[bytes], unchanged: bool) -> _Mapping | None:
    first, end, offset = (int(match[i], 16) for i in (1, 2, 4))
    inode, path = int(match[7]), match[8] and match[8].replace(b"\\012", b"\n")
    if path is None or path.endswith(_DELETED) or not inode:
        return None
    try:
        same = os.stat(path)
    except OSError:
        return None
    if same.st_ino != inode:
        return None
    # Some file systems, such as btrfs, list mappings under another device than their files; then bytes are compared.
    known = same.st_dev == os.makedev(int(match[5], 16), int(match[6], 16))
    return _Mapping(first, end, Path(os.fsdecode(path)), offset, unchanged and known)


def _equals_file(flat: torch.Tensor, own: MappedBytes) -> bool:
    """Return whether a tensor's bytes are those of the file."""
    try:
        with own.path.open("rb") as file:
            for start in range(0, own.n_bytes, _COMPARED_BYTES):
                part = flat[start : start + _COMPARED_BYTES]
                file.seek(own.start + start)
                if file.read(part.numel()) != part.numpy().tobytes():
                    return False
    except OSError:
        return False
    return True
