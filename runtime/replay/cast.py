"""Parameters whose values RAM has in their float32 copies alone, cast whenever somebody asks for them.

Their memory is in files, and after an update it is older than the copies. It is written when the host's values have to
be current.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ...errors import StorageError
from ..devices.pinned import flat_bytes
from ..events import Event, UnderWay
from ..layouts import steps_of
from ..storage.file_bytes import StoredBytes
from .binding import HostState

MASTER = "master"  # the key of the float32 copy among the parts of a parameter's state
PIECE_BYTES = 1 << 22  # of a parameter, on its way to its files
_PIECES = 2  # one is cast while another is written
_DONE = UnderWay("nothing", ())


def buffers_bytes(largest_bytes: int) -> int:
    """Return the bytes of RAM that parameters, the largest of so many bytes, pass on their way to their files."""
    size, number = _pieces(largest_bytes)
    return number * size


def _pieces(n_bytes: int) -> tuple[int, int]:
    """Return the bytes of a piece of a parameter, and how many are in RAM at a time."""
    size = min(PIECE_BYTES, n_bytes)
    return size, min(_PIECES, -(-n_bytes // size))


@dataclass(frozen=True)
class CastBytes:
    """The bytes of a parameter, cast from its float32 copy if that is newer than its files.

    Parameters
    ----------
    host: has the copy, and knows whether it is newer. name: of the parameter. stored: its bytes in files.
    """

    host: HostState
    name: str
    stored: StoredBytes
    in_ram: ClassVar[bool] = True

    @staticmethod
    def of(host: HostState, name: str) -> CastBytes:
        """Return the bytes of a parameter in files."""
        return CastBytes(host, name, _stored(host, name))

    @property
    def start(self) -> int:
        return self.stored.start

    @property
    def path(self) -> Path:
        return self.stored.path

    def read(self, target: torch.Tensor, offset: int, after: Sequence[Event] = ()) -> Event:
        """Fill `target` now if the copy is newer; otherwise start to read the files, as `BytesInFile.read`."""
        if self.name not in self.host.newer_copies:
            return self.stored.read(target, offset, after)
        for event in after:
            event.synchronize()
        _cast(self.host, self.name, target, offset)
        return _DONE


def stays_behind(host: HostState, name: str) -> bool:
    """Return whether a parameter may be older than its float32 copy after an update: it is in files, laid out alike."""
    param, copy = host.params[name], host.states.get(name, {}).get(MASTER)
    if not host.stores(name):
        return False
    return copy is None or (  # the first update makes it from the parameter
        isinstance(copy, torch.Tensor)
        and copy.dtype == torch.float32
        and copy.device.type == "cpu"
        and copy.shape == param.shape
        and steps_of(copy.shape, copy.stride()) == steps_of(param.shape, param.stride())
        and flat_bytes(copy) is not None
    )


def make_copy(host: HostState, name: str) -> None:
    """Make the float32 copy of a parameter in files before its first update, from bytes that are verified."""
    param, state = host.params[name], host.states.setdefault(name, {})
    copy = torch.empty_strided(param.shape, param.stride(), dtype=torch.float32)
    whole, home = flat_bytes(copy), _stored(host, name)
    assert whole is not None, "it is laid out as the parameter is, which is in files in one piece"
    n_bytes = param.numel() * param.element_size()
    piece = torch.empty(min(PIECE_BYTES, n_bytes), dtype=torch.uint8)
    with torch.no_grad():
        for start in range(0, n_bytes, PIECE_BYTES):
            part = piece[: min(PIECE_BYTES, n_bytes - start)]
            home.read(part, start).synchronize()
            values = part.view(param.dtype)
            first = start // param.element_size()
            whole.view(torch.float32)[first : first + values.numel()].copy_(values)
    state[MASTER] = copy


def bring_home(host: HostState, *, after_failure: bool = False) -> frozenset[str]:
    """Write the parameters whose float32 copies are newer to their files; nothing may be under way.

    Parameters
    ----------
    after_failure: go on with the others where values cannot be written.

    Returns: the parameters whose newest values are lost by that.
    """
    lost = set()
    for name in sorted(host.newer_copies):
        try:
            _write(host, name)
        except StorageError:
            if not after_failure:
                raise
            lost.add(name)
        host.newer_copies.discard(name)
    return frozenset(lost)


def _write(host: HostState, name: str) -> None:
    home, n_bytes = _stored(host, name), host.params[name].numel() * host.params[name].element_size()
    size, at_a_time = _pieces(n_bytes)
    pieces, written = [torch.empty(size, dtype=torch.uint8) for _ in range(at_a_time)], deque[Event]()
    try:
        for number, start in enumerate(range(0, n_bytes, size)):
            if len(written) == at_a_time:
                written.popleft().synchronize()
            piece = pieces[number % at_a_time][: min(size, n_bytes - start)]
            _cast(host, name, piece, start)
            written.append(home.write(piece, start))
    finally:
        for event in written:
            event.synchronize()


def _stored(host: HostState, name: str) -> StoredBytes:
    stored = host.store.bytes_of(host.params[name]) if host.store is not None else None
    assert stored is not None, "it is in files"
    return stored


def _cast(host: HostState, name: str, target: torch.Tensor, offset: int) -> None:
    """Fill flat bytes with those of a parameter from an offset on."""
    copy, param = host.states[name][MASTER], host.params[name]
    assert isinstance(copy, torch.Tensor), "an update has made it"
    whole = flat_bytes(copy)
    assert whole is not None, "it is laid out as the parameter is"
    first, size = offset // param.element_size(), target.numel() // param.element_size()
    with torch.no_grad():
        target.view(param.dtype).copy_(whole.view(copy.dtype)[first : first + size])
