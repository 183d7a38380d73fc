"""Pieces of a stored tensor that share no chunk, bytes that were written past the engine, and space given back."""

from __future__ import annotations

import errno
import logging

import pytest
import torch
from offmate.runtime.events import LaneEvent

from offmate.errors import ArgumentValueError, StorageError

from .faulty import CHUNK, PAGE, Faulty, engine_on, flipped, once, random_bytes, read, refused


def test_pieces_share_no_chunk_where_their_offsets_are_whole_pages(tmp_path):
    files = Faulty()
    with engine_on(tmp_path / "a", tmp_path / "b", files=files) as running:
        stored = running.store("weight", 4 * CHUNK + 5, cuts=[3 * PAGE, 0, 6 * PAGE, 6 * PAGE + 100, 4 * CHUNK + 5])
        assert list(stored.chunks.sizes) == [CHUNK, PAGE, CHUNK, PAGE, CHUNK, 5]
        files.calls.clear()
        pieces = [(0, 3 * PAGE), (3 * PAGE, 3 * PAGE), (6 * PAGE, 100), (6 * PAGE + 100, stored.n_bytes)]
        for start, end in ((0, 3 * PAGE), (3 * PAGE, 6 * PAGE)):
            running.write(stored, random_bytes(end - start, start), start=start).synchronize()
        assert files.calls.count("pwritev") == 4 and "preadv" not in files.calls
        for start, end in ((6 * PAGE, 6 * PAGE + 100), (6 * PAGE + 100, stored.n_bytes)):  # these share one
            running.write(stored, random_bytes(end - start, start), start=start).synchronize()
        assert files.calls.count("preadv") == 1
        for start, n_bytes in pieces[:2]:
            assert torch.equal(read(running, stored, start, n_bytes), random_bytes(n_bytes, start))


def test_without_cuts_all_chunks_but_the_last_are_whole_requests(tmp_path):
    with engine_on(tmp_path) as running:
        assert running.store("weight", 2 * CHUNK + 5).chunks.sizes == (CHUNK, CHUNK, 5)
        assert running.store("other", 2 * CHUNK, cuts=[CHUNK]).chunks.sizes == (CHUNK, CHUNK)


@pytest.mark.parametrize("cut", [-PAGE, 2 * CHUNK])
def test_a_cut_outside_a_tensor_is_refused_and_takes_no_space(tmp_path, cut):
    with engine_on(tmp_path) as running:
        with pytest.raises(ArgumentValueError, match=rf"cuts=\[{cut}\] are not within weight, which has {CHUNK} bytes"):
            running.store("weight", CHUNK, cuts=[PAGE, cut])
        assert list(tmp_path.glob("*.tensor")) == []


def write_into(stored, content, start=0):
    """Write to the file as a mapping does: the engine is not told."""
    with stored.files[0].open("r+b") as file:
        file.seek(start)
        file.write(bytes(content.tolist()))


def test_what_is_forgotten_counts_as_written_and_is_not_verified(tmp_path):
    with engine_on(tmp_path) as running:
        stored = running.store("weight", 3 * CHUNK)
        running.write(stored, random_bytes(CHUNK), start=0).synchronize()
        write_into(stored, random_bytes(CHUNK, 1), start=100)
        with pytest.raises(StorageError, match="does not hold what was written"):
            read(running, stored, 0, 100)
        stored.forget(100, 100 + CHUNK)
        expected = torch.cat([random_bytes(CHUNK)[:100], random_bytes(CHUNK, 1)])
        assert torch.equal(read(running, stored, 0, 100 + CHUNK), expected)
        with pytest.raises(StorageError, match=f"byte {100 + CHUNK} of weight was read"):
            read(running, stored)


def test_a_write_of_a_part_keeps_what_was_forgotten_and_verifies_it_from_then_on(tmp_path):
    files = Faulty()
    with engine_on(tmp_path, files=files) as running:
        stored = running.store("weight", CHUNK)
        write_into(stored, random_bytes(CHUNK, 1))
        stored.forget(0, 1000)
        running.write(stored, random_bytes(100, 2), start=500).synchronize()
        expected = random_bytes(CHUNK, 1)[:1000].clone()
        expected[500:600] = random_bytes(100, 2)
        assert torch.equal(read(running, stored, 0, 1000), expected)
        files.faults["preadv"] = once(flipped)
        with pytest.raises(StorageError, match="does not hold what was written"):
            read(running, stored, 0, 1000)


@pytest.mark.parametrize("writes", [False, True])
def test_chunks_of_a_transfer_that_has_not_ended_cannot_be_forgotten(tmp_path, writes):
    with engine_on(tmp_path) as running:
        stored, gate = running.store("weight", 2 * CHUNK), LaneEvent()
        running.write(stored, random_bytes(2 * CHUNK)).synchronize()
        transfer = (running.write if writes else running.read)(stored, random_bytes(10, 1), after=(gate,), start=0)
        word = "wrote" if writes else "read"
        with pytest.raises(StorageError, match=rf"bytes 100 to 200 of weight .* engine {word} bytes 0 to 10, .* wait"):
            stored.forget(100, 200)
        stored.forget(CHUNK, 2 * CHUNK)
        stored.forget(0, 0)
        gate.settle()
        transfer.synchronize()
        stored.forget(100, 200)


@pytest.mark.parametrize(("start", "end"), [(-1, 5), (5, CHUNK + 1), (5, 4)])
def test_only_bytes_of_the_tensor_can_be_forgotten(tmp_path, start, end):
    with engine_on(tmp_path) as running, pytest.raises(ArgumentValueError, match="are not within weight"):
        running.store("weight", CHUNK).forget(start, end)


def test_released_space_is_given_back_once_nobody_uses_it(tmp_path):
    with engine_on(tmp_path / "a", tmp_path / "b") as running:
        stored, gate = running.store("weight", 3 * CHUNK), LaneEvent()
        write = running.write(stored, random_bytes(3 * CHUNK), after=(gate,))
        running.release(stored)
        del stored
        assert len(list(tmp_path.glob("*/*.tensor"))) == 2
        gate.settle()
        write.synchronize()
        running.store("weight", CHUNK)  # the name is free again
        assert [file.parent.name for file in tmp_path.glob("*/*.tensor")] == ["a"]  # as if nothing had been stored


def test_space_that_cannot_be_given_back_is_reported_and_removed_at_the_end(tmp_path, caplog):
    files = Faulty()
    with engine_on(tmp_path, files=files) as running:
        stored = running.store("weight", CHUNK)
        files.faults["unlink"] = once(refused(errno.EIO))
        running.release(stored)
        with caplog.at_level(logging.WARNING, "offmate"):
            del stored
        assert "no longer used stays taken" in caplog.text and "Input/output error" in caplog.text
        assert len(list(tmp_path.glob("*.tensor"))) == 1
    assert list(tmp_path.iterdir()) == []
