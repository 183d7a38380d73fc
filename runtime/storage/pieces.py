"""Tensors that a checkpoint keeps in pieces of files, on one path or on several."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ...errors import StorageError
from .addresses import reserved
from .checksums import checksum
from .files import Files
from .host_bytes import AlignedBytes, round_up
from .open_file import OpenFile, failed, open_to_read


class Piece(NamedTuple):
    """Neighbouring bytes of a tensor in a file.

    Parameters
    ----------
    path: of the file. offset: in bytes, of the first one there. first: which byte of the tensor it is.
    n_bytes: how many there are. checksum: of them and of what follows up to a whole block of 4,096.
    """

    path: Path
    offset: int
    first: int
    n_bytes: int
    checksum: int


def check_pieces(files: Files, pieces: Sequence[Piece]) -> None:
    """Read pieces, and compare them with their checksums.

    Raises: StorageError for one that cannot be read, or that is not as it was written.
    """
    memory = AlignedBytes(max((round_up(piece.n_bytes) for piece in pieces), default=1))
    for path in dict.fromkeys(piece.path for piece in pieces):
        file = open_to_read(files, path)
        try:
            for piece in (one for one in pieces if one.path == path):
                _check(file, piece, memory)
        finally:
            file.close()


def _check(file: OpenFile, piece: Piece, memory: AlignedBytes) -> None:
    n_bytes = round_up(piece.n_bytes)
    _check_length(file, piece)
    file.read(memory.address, n_bytes, piece.offset, n_bytes)
    if checksum(memory.address, n_bytes) != piece.checksum:
        raise StorageError(
            f"{piece.path} is not as the checkpoint was written, between offsets {piece.offset} and "
            f"{piece.offset + n_bytes}: the checksums differ"
        )


def _check_length(file: OpenFile, piece: Piece) -> None:
    if file.stat().st_size < piece.offset + round_up(piece.n_bytes):
        raise StorageError(
            f"{piece.path} is too short: it has {file.stat().st_size} bytes, and those from {piece.offset} to "
            f"{piece.offset + piece.n_bytes} are a tensor's"
        )


def tensor_of(files: Files, name: str, pieces: Sequence[Piece], like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is mapped from its pieces: it takes no RAM until somebody writes to it, and they stay.

    Parameters
    ----------
    name: for messages. pieces: in order, all of the tensor's bytes. like: has its shape, strides and dtype.

    Raises: StorageError if a file cannot be mapped.
    """
    n_bytes = sum(piece.n_bytes for piece in pieces)
    try:
        addresses = reserved(round_up(n_bytes))
    except OSError as error:
        raise failed(f"reserving addresses for {name} from", pieces[0].path, error) from error
    try:
        for piece in _joined(pieces):
            _map(files, piece, addresses.first)
    except BaseException:
        addresses.give_back()
        raise
    memory = (ctypes.c_ubyte * n_bytes).from_address(addresses.first)
    weakref.finalize(memory, addresses.give_back).atexit = False
    flat = torch.frombuffer(memory, dtype=torch.uint8)  # its storage holds the object, which dies with it
    return torch.empty(0, dtype=like.dtype, device="cpu").set_(flat.untyped_storage(), 0, like.shape, like.stride())


def _map(files: Files, piece: Piece, address: int) -> None:
    try:
        file = OpenFile(files, piece.path, files.open(piece.path, os.O_RDONLY), direct=False)
    except OSError as error:
        raise failed("opening", piece.path, error) from error
    try:
        _check_length(file, piece)
        file.map(address + piece.first, round_up(piece.n_bytes), piece.offset, shared=False)
    finally:
        file.close()


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces that can be mapped by one call each; the system allows a process only so many mappings."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and last.path == piece.path and last.offset + last.n_bytes == piece.offset:
            found[-1] = last._replace(n_bytes=last.n_bytes + piece.n_bytes)
        else:
            found.append(piece)
    return found
