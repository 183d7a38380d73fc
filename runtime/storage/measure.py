"""Rates of storage paths and of files, measured with the engine itself."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import ArgumentValueError
from ..events import Event
from .engine import Engine
from .folders import StoragePath
from .host_bytes import ALIGNMENT_BYTES, empty_aligned, round_down
from .stored import Stored
from .throttle import Throttle

_PIECE_BYTES = 1 << 26
_DEPTH = 4  # pieces under way in each direction

_PARTS = 256  # of the bytes that are written at most to find the sustained rates
_WHILE = 16  # parts in which the rate has to stay as it is
_READ = 8  # parts that the first rate is of; as many are read, and read while as many are written
_SLOWER = 1.25  # a rate that has fallen by less may be noise
_ALIKE = 0.1  # by which a part's seconds may differ from the mean where the rate has settled

Piece = tuple[int, int, int]
"""Where it begins, its bytes, and which of the buffers it goes through."""


@dataclass(frozen=True)
class PathRates:
    """Bytes per second of a path.

    Parameters
    ----------
    read_bytes_per_s, write_bytes_per_s: alone. both_bytes_per_s: of reads and writes together, as many bytes of each.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float


@dataclass(frozen=True)
class SustainedRates:
    """Bytes per second of a path once its drive's fast cache is full.

    Parameters
    ----------
    rates: past the cache. first_write_bytes_per_s: of writes at first, alone.
    written_bytes: until the rate of writes was known. fell: whether that is below the first rate.
    settled: whether it stayed as it was for a while; if it fell and did not settle, it is a mean of the last quarter.
    """

    rates: PathRates
    first_write_bytes_per_s: float
    written_bytes: int
    fell: bool
    settled: bool


def rates(path: StoragePath, n_bytes: int, throttle: Throttle | None = None) -> PathRates:
    """Measure a path, on space that has been written before, as it is while a model trains.

    Parameters
    ----------
    n_bytes: of each measurement, at least 4,096; twice as many are reserved and four times as many written. A drive
        whose fast cache is larger shows the rate of its cache.

    Raises: StorageError if the path cannot be stored in, or has too little space.
    """
    _check_size(n_bytes)
    with Engine([path], throttles=[throttle]) as engine:
        first, second = (engine.store(name, n_bytes) for name in ("first", "second"))
        outgoing = _buffers(n_bytes).random_(0, 256)  # some drives compress
        incoming = _buffers(n_bytes).zero_()

        def write(stored: Stored) -> Callable[[Piece], Event]:
            return lambda piece: engine.write(stored, _part(outgoing, piece), start=piece[0])

        def read(piece: Piece) -> Event:
            return engine.read(first, _part(incoming, piece), start=piece[0])

        pieces = _pieces(range(0, n_bytes, _PIECE_BYTES), n_bytes)
        for stored in (first, second):
            _seconds(pieces, [write(stored)])
        write_s = _seconds(pieces, [write(first)])
        read_s = _seconds(pieces, [read])
        both_s = _seconds(pieces, [read, write(second)])
    return PathRates(n_bytes / read_s, n_bytes / write_s, 2 * n_bytes / both_s)


def sustained_rates(
    path: StoragePath,
    most_bytes: int,
    throttle: Throttle | None = None,
    say: Callable[[float], None] = lambda share: None,
) -> SustainedRates:
    """Measure a path past its drive's cache: write until the rate has fallen and stays as it is, then read as well.

    The files are removed afterwards, also if it is interrupted.

    Parameters
    ----------
    most_bytes: that are written in all, at least 1 MiB; as many must be free. A drive whose cache is larger, or that
        has none, gets all of them. say: is told which share of them is written.

    Raises: StorageError if the path cannot be stored in, or has too little space.
    """
    part_bytes = round_down(most_bytes // _PARTS)
    _check_size(part_bytes)
    with Engine([path], throttles=[throttle]) as engine:
        outgoing, incoming = _buffers(part_bytes).random_(0, 256), _buffers(part_bytes).zero_()
        pieces = _pieces(range(0, part_bytes, _PIECE_BYTES), part_bytes)
        parts: list[Stored] = []

        def write(piece: Piece) -> Event:
            return engine.write(parts[-1], _part(outgoing, piece), start=piece[0])

        def reading(stored: Stored) -> Callable[[Piece], Event]:
            return lambda piece: engine.read(stored, _part(incoming, piece), start=piece[0])

        def add() -> None:
            parts.append(engine.store(f"part {len(parts)}", part_bytes))
            say(len(parts) / _PARTS)

        seconds: list[float] = []
        # Writing a part to reserve it counts, too.
        while not has_settled(seconds) and (len(parts) + _READ + 1) * (1 + engine.fills) <= _PARTS:
            add()
            seconds.append(_seconds(pieces, [write]))
        n_written = len(parts) * (1 + engine.fills)
        both_s = read_s = 0.0
        for stored in parts[:_READ]:
            add()
            both_s += _seconds(pieces, [write, reading(stored)])
        for stored in parts[:_READ]:
            read_s += _seconds(pieces, [reading(stored)])
    settled = has_settled(seconds)
    write_s = _mean(seconds[-_WHILE:] if settled else seconds[-(len(seconds) // 4) :])
    read_bytes = _READ * part_bytes
    found = PathRates(read_bytes / read_s, part_bytes / write_s, 2 * read_bytes / both_s)
    first_s = _first(seconds)
    return SustainedRates(found, part_bytes / first_s, n_written * part_bytes, write_s > _SLOWER * first_s, settled)


def has_settled(seconds: Sequence[float]) -> bool:
    """Return whether writes have become slower and take equally long since a while.

    Parameters
    ----------
    seconds: of each part until now; the parts have equally many bytes.
    """
    last = seconds[-_WHILE:]
    if len(last) < _WHILE or _mean(last) <= _SLOWER * _first(seconds):
        return False
    return all(abs(one - _mean(last)) <= _ALIKE * _mean(last) for one in last)


def _first(seconds: Sequence[float]) -> float:
    """Return the least seconds of the first parts, of which the very first one may have had to wait for the drive."""
    return min(seconds[:_READ])


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds)


def read_rate(path: str | os.PathLike[str], n_bytes: int, throttle: Throttle | None = None) -> float:
    """Measure how many bytes per second a safetensors file is read with, by parts of it that are spread over it.

    Parameters
    ----------
    n_bytes: how many are read; no more than the file has.

    Raises: StorageError if it cannot be read.
    """
    _check_size(n_bytes)
    with Engine() as engine:
        file = engine.open(Path(path), throttle)
        wanted = min(n_bytes, file.size_bytes)
        n_pieces = -(-wanted // _PIECE_BYTES)
        length = -(-wanted // n_pieces)
        starts = [round_down(number * (file.size_bytes // n_pieces)) for number in range(n_pieces)]
        memory = _buffers(length).zero_()
        pieces = _pieces(starts, file.size_bytes, length)
        read_s = _seconds(pieces, [lambda piece: engine.read(file, _part(memory, piece), start=piece[0])])
    return sum(piece[1] for piece in pieces) / read_s


def _check_size(n_bytes: int) -> None:
    if n_bytes < ALIGNMENT_BYTES:
        raise ArgumentValueError(f"{n_bytes} bytes are too few to measure a rate; use at least {ALIGNMENT_BYTES}")


def _buffers(n_bytes: int) -> torch.Tensor:
    return empty_aligned(_DEPTH * min(_PIECE_BYTES, n_bytes + ALIGNMENT_BYTES))


def _pieces(starts: Sequence[int], end: int, length: int = _PIECE_BYTES) -> list[Piece]:
    return [(start, min(length, end - start), number % _DEPTH) for number, start in enumerate(starts)]


def _part(memory: torch.Tensor, piece: Piece) -> torch.Tensor:
    _, n_bytes, slot = piece
    start = slot * round_down(memory.numel() // _DEPTH)
    return memory[start : start + n_bytes]


def _seconds(pieces: Sequence[Piece], directions: Sequence[Callable[[Piece], Event]]) -> float:
    """Return the seconds of all pieces in all directions, a few pieces of each under way at once."""
    under_way: deque[list[Event]] = deque()
    start_s = time.perf_counter()
    for piece in pieces:
        if len(under_way) == _DEPTH:
            _wait(under_way.popleft())
        under_way.append([submit(piece) for submit in directions])
    for events in under_way:
        _wait(events)
    return time.perf_counter() - start_s


def _wait(events: Sequence[Event]) -> None:
    for event in events:
        event.synchronize()
