"""Measured rates are those of a throttle, whatever the disk below can do."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from offmate.runtime.storage import measure
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.files import SystemFiles
from offmate.runtime.storage.folders import StoragePath
from offmate.runtime.storage.throttle import Throttle

from offmate.errors import ArgumentValueError, StorageError

from .faulty import checkpoint

N_BYTES = 10_000_000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(measure, "_PIECE_BYTES", 1 << 22)


def test_a_path_has_at_most_the_rates_of_its_throttle(tmp_path):
    found = measure.rates(StoragePath(tmp_path), N_BYTES, Throttle(400e6, 200e6))
    assert 0.1 * 400e6 < found.read_bytes_per_s <= 400e6
    assert 0.1 * 200e6 < found.write_bytes_per_s <= 200e6
    assert 0.1 * 267e6 < found.both_bytes_per_s <= 267e6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n_bytes", [4096, 300_000, 10 * N_BYTES])
def test_parts_of_a_file_have_at_most_the_rate_of_its_throttle(tmp_path, n_bytes):
    path = checkpoint(tmp_path / "model.safetensors", N_BYTES)
    assert 0 < measure.read_rate(path, n_bytes, Throttle(400e6, 1)) <= 400e6


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(ArgumentValueError, match="12 bytes are too few"):
        measure.rates(StoragePath(tmp_path), 12)
    with pytest.raises(StorageError, match="is not a folder"):
        measure.rates(StoragePath(tmp_path / "absent"), N_BYTES)


class Counting(SystemFiles):
    """The system's files, with the bytes that were written to them, markers aside."""

    written_bytes = 0

    def pwritev(self, handle, buffers, offset):
        done = super().pwritev(handle, buffers, offset)
        self.written_bytes += done if done % 4096 == 0 else 0
        return done


class Cached(Throttle):
    """A drive whose writes are slower once its cache is full."""

    def __init__(self, cache_bytes: int, write_bytes_per_s: float, past_it_bytes_per_s: float) -> None:
        super().__init__(4e9, write_bytes_per_s)
        self.left_bytes, self.past_it_bytes_per_s = cache_bytes, past_it_bytes_per_s

    def due_s(self, writes: bool, n_bytes: int) -> float:
        if writes:
            self.left_bytes -= n_bytes
            if self.left_bytes < 0:
                self._bytes_per_s[True] = self.past_it_bytes_per_s
        return super().due_s(writes, n_bytes)


MOST_BYTES = 64 << 20


def test_the_sustained_rate_is_that_past_a_drives_cache(tmp_path):
    shares: list[float] = []
    found = measure.sustained_rates(StoragePath(tmp_path), MOST_BYTES, Cached(8 << 20, 2e9, 50e6), shares.append)
    assert found.rates.write_bytes_per_s <= 50e6
    assert found.rates.both_bytes_per_s <= 2 * 50e6
    assert 8 << 20 < found.written_bytes <= MOST_BYTES
    assert shares == sorted(shares) and shares[-1] <= 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([1.0] * 200, False),
        ([1.0] * 100 + [4.0] * 15, False),
        ([1.0] * 100 + [4.0] * 16, True),
        ([3.0] + [1.0] * 100 + [1.2] * 16, False),
        ([1.0] * 100 + [4.0, 8.0] * 40, False),
        ([1.0] * 100 + [4.0, 8.0] * 40 + [6.0] * 16, True),
    ],
    ids=["never slower", "not long enough", "long enough", "little slower", "up and down", "steady in the end"],
)
def test_a_rate_has_settled_when_it_fell_and_stays(seconds, expected):
    assert measure.has_settled(seconds) is expected


def drive_of(monkeypatch, seconds_of_writes: Callable[[int], float]) -> None:
    """Let every part that is written take so many seconds, by its number."""
    number = iter(range(10**6))

    def took(pieces, directions):
        real(pieces, directions)
        return seconds_of_writes(next(number))

    real = measure._seconds
    monkeypatch.setattr(measure, "_seconds", took)


def test_writes_stop_once_the_rate_has_settled(tmp_path, monkeypatch):
    drive_of(monkeypatch, lambda number: 1.0 if number < 100 else 4.0)
    found = measure.sustained_rates(StoragePath(tmp_path), MOST_BYTES)
    part = MOST_BYTES // 256
    assert found.fell and found.settled and found.written_bytes == 116 * part
    assert (found.first_write_bytes_per_s, found.rates.write_bytes_per_s) == (part, part / 4)


def test_a_drive_without_a_cache_gets_all_that_was_said_and_no_more(tmp_path, monkeypatch):
    drive_of(monkeypatch, lambda number: 1.0)
    files = Counting()
    monkeypatch.setattr(measure, "Engine", functools.partial(Engine, files=files))
    found = measure.sustained_rates(StoragePath(tmp_path), MOST_BYTES)
    assert not found.fell and not found.settled
    assert found.rates.write_bytes_per_s == found.first_write_bytes_per_s == MOST_BYTES // 256
    assert 0.9 * MOST_BYTES < found.written_bytes <= MOST_BYTES
    assert 0.9 * MOST_BYTES < files.written_bytes <= MOST_BYTES + 4096


def test_a_rate_that_never_settles_is_a_mean(tmp_path, monkeypatch):
    drive_of(monkeypatch, lambda number: 1.0 if number < 100 else 4.0 + 4.0 * (number % 2))
    found = measure.sustained_rates(StoragePath(tmp_path), MOST_BYTES)
    assert found.fell and not found.settled
    assert MOST_BYTES // 256 / found.rates.write_bytes_per_s == pytest.approx(6.0, rel=0.05)


def test_writing_space_to_reserve_it_counts(tmp_path, monkeypatch):
    """Where a file system cannot reserve, the drive gets every byte twice, and no more in all than was said."""
    drive_of(monkeypatch, lambda number: 1.0)
    files = Counting()
    files.fallocate = lambda handle, n_bytes: False  # type: ignore[method-assign]
    monkeypatch.setattr(measure, "Engine", functools.partial(Engine, files=files))
    measure.sustained_rates(StoragePath(tmp_path), MOST_BYTES)
    assert 0.9 * MOST_BYTES < files.written_bytes <= MOST_BYTES + 4096


def test_nothing_stays_after_an_interrupt(tmp_path):
    def interrupt(share: float) -> None:
        if share > 0.1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.sustained_rates(StoragePath(tmp_path), MOST_BYTES, say=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_too_little_is_no_drive(tmp_path):
    with pytest.raises(ArgumentValueError, match="too few to measure a rate"):
        measure.sustained_rates(StoragePath(tmp_path), 1 << 19)
