"""Measured rates are those of a throttle, whatever the disk below can do."""

from __future__ import annotations

import pytest
from offmate.runtime.storage import measure
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
