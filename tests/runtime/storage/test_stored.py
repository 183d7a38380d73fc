"""What is stored is what is read, by range, in any order and over any paths; everything else raises by name."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offmate.runtime.events import LaneEvent
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.host_bytes import empty_aligned
from offmate.runtime.storage.throttle import Throttle

from offmate.errors import ArgumentTypeError, ArgumentValueError, StorageError

from ...fuzz.examples import examples
from .faulty import (
    CHUNK,
    PAGE,
    Faulty,
    at_most,
    engine_on,
    flipped,
    interrupted,
    once,
    random_bytes,
    read,
    refused,
    without_direct,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(2))
@given(st.data())
def test_random_writes_and_reads_equal_a_dictionary_of_bytes(tmp_path, data):
    n_bytes = data.draw(st.sampled_from([1, 100, PAGE, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + PAGE + 7]), "size")
    n_paths = data.draw(st.integers(1, 3), "paths")
    buffered = data.draw(st.booleans(), "without O_DIRECT")
    files = Faulty(open=without_direct) if buffered else None
    with engine_on(*(tmp_path / str(k) for k in range(n_paths)), files=files) as running:
        stored = running.store("weight", n_bytes)
        known: dict[int, int] = {}
        checks = []
        for seed in range(data.draw(st.integers(1, 8), "transfers")):
            start = data.draw(st.integers(0, n_bytes - 1), "start")
            length = data.draw(st.integers(0, n_bytes - start), "length")
            aligned = data.draw(st.booleans(), "aligned")
            memory = empty_aligned(length, start) if aligned else torch.zeros(length + 1, dtype=torch.uint8)[1:]
            if data.draw(st.booleans(), "writes"):
                memory.copy_(random_bytes(length, seed))
                running.write(stored, memory, start=start)
                known |= {start + i: value for i, value in enumerate(memory.tolist())}
            elif all(byte in known for byte in range(start, start + length)):
                event = running.read(stored, memory, start=start)
                checks.append((event, memory, [known[byte] for byte in range(start, start + length)]))
            else:
                with pytest.raises(StorageError, match=r"of weight was read .* never written"):
                    running.read(stored, memory, start=start)
        for event, memory, expected in checks:
            event.synchronize()
            assert memory.tolist() == expected
    assert all(list((tmp_path / str(k)).iterdir()) == [] for k in range(n_paths))


def test_a_tensor_lies_on_its_paths_in_proportion(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    with engine_on(*folders) as running:
        stored = running.store("weight", 8 * CHUNK, proportions=[3, 1, 0])
        assert [[file.stat().st_size for file in folder.glob("*.tensor")] for folder in folders] == [
            [6 * CHUNK],
            [2 * CHUNK],
            [],
        ]
        content = random_bytes(stored.n_bytes)
        running.write(stored, content)
        assert torch.equal(read(running, stored), content)
        assert [file.parent for file in stored.files] == folders[:2]


def test_space_is_taken_before_the_first_write(tmp_path):
    with engine_on(tmp_path) as running:
        running.store("weight", 3 * CHUNK + 5)
        (file,) = tmp_path.glob("*.tensor")
        assert file.stat().st_size == file.stat().st_blocks * 512 == 3 * CHUNK + PAGE


def cannot_reserve(real, handle, n_bytes):
    return False


def test_where_space_cannot_be_reserved_the_file_is_written_once(tmp_path):
    files = Faulty(fallocate=cannot_reserve)
    with engine_on(tmp_path, files=files) as running:
        stored = running.store("weight", 3 * CHUNK + 5)
        (file,) = tmp_path.glob("*.tensor")
        assert file.stat().st_size == file.stat().st_blocks * 512 == 3 * CHUNK + PAGE
        with pytest.raises(StorageError, match="never written"):
            read(running, stored)


@pytest.mark.parametrize(
    "faults",
    [
        {"fallocate": refused(errno.ENOSPC)},
        {"fallocate": refused(errno.EDQUOT)},
        {"fallocate": cannot_reserve, "free_bytes": lambda real, path: 5 * PAGE},
        {"fallocate": cannot_reserve, "pwritev": once(refused(errno.ENOSPC), skip=3)},
    ],
    ids=["fallocate", "quota", "free space", "a write"],
)
def test_too_little_space_names_the_path_and_both_sizes_and_leaves_nothing(tmp_path, faults):
    files = Faulty(**({"free_bytes": lambda real, path: 6 * PAGE} | faults))
    with engine_on(tmp_path, files=files) as running:
        with pytest.raises(
            StorageError, match=rf"{tmp_path}/offmate-.* needs 32 KiB, and 2[04] KiB are free in"
        ) as found:
            running.store("weight", 4 * CHUNK)
        assert "larger disk" in str(found.value)
        assert list(tmp_path.glob("*.tensor")) == []
        files.faults.clear()
        running.store("weight", CHUNK)  # the name is free again


def test_a_second_path_without_space_frees_the_first_one(tmp_path):
    files = Faulty(fallocate=once(refused(errno.ENOSPC), skip=1))
    with engine_on(tmp_path / "a", tmp_path / "b", files=files) as running:
        with pytest.raises(StorageError, match=r"/b/offmate-.* needs"):
            running.store("weight", 3 * CHUNK)
        assert list(tmp_path.glob("*/*.tensor")) == []
        for name, folder in (("first", "a"), ("second", "b")):  # what was not stored is in nobody's share
            assert [file.parent.name for file in running.store(name, CHUNK).files] == [folder]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("weight", 5), "weight is stored already"),
        (("other", 0), "other has 0 bytes"),
        (("other", 5, [1, 2]), "do not fit 1 paths"),
        (("other", 5, [0]), "not all zero"),
        (("other", 5, [-1]), "none negative"),
        (("other", 5, [float("nan")]), "none negative"),
    ],
)
def test_what_cannot_be_stored_is_refused(tmp_path, arguments, words):
    with engine_on(tmp_path) as running:
        running.store("weight", 5)
        with pytest.raises(ArgumentValueError, match=words):
            running.store(*arguments)


def test_without_paths_nothing_can_be_stored():
    with Engine() as running, pytest.raises(ArgumentValueError, match="for 0 paths"):
        running.store("weight", 5)


def test_a_tensor_of_another_size_is_refused(tmp_path):
    with engine_on(tmp_path) as running:
        stored = running.store("weight", 100)
        for size, start in ((99, None), (50, 51), (1, -1)):
            with pytest.raises(ArgumentValueError, match="weight"):
                running.write(stored, random_bytes(size), start=start)
        with pytest.raises(ArgumentTypeError, match=r"torch\.float32"):
            running.write(stored, torch.zeros(25))


def test_transfers_of_the_same_bytes_keep_their_order_without_events(tmp_path):
    with engine_on(tmp_path, n_threads=4) as running:
        stored = running.store("weight", 3 * CHUNK)
        gate = LaneEvent()
        running.write(stored, random_bytes(3 * CHUNK, 1), after=(gate,))
        target = torch.zeros(3 * CHUNK, dtype=torch.uint8)
        first = running.read(stored, target)
        running.write(stored, random_bytes(2 * CHUNK, 2), start=CHUNK)
        assert not first.done()
        gate.settle()
        expected = torch.cat([random_bytes(3 * CHUNK, 1)[:CHUNK], random_bytes(2 * CHUNK, 2)])
        assert torch.equal(read(running, stored), expected)
        assert torch.equal(target, random_bytes(3 * CHUNK, 1))


def test_rows_that_share_a_chunk_do_not_wait_for_each_other_but_both_arrive(tmp_path):
    with engine_on(tmp_path, n_threads=4) as running:
        stored = running.store("weight", CHUNK)
        never = LaneEvent()
        first, second = random_bytes(1000, 1), random_bytes(1000, 2)
        waits = running.write(stored, first, start=0, after=(never,))
        running.write(stored, second, start=1000).synchronize()
        assert not waits.done() and torch.equal(read(running, stored, 1000, 1000), second)
        never.settle()
        assert torch.equal(read(running, stored, 0, 2000), torch.cat([first, second]))
        many = [running.write(stored, random_bytes(100, i), start=100 * i) for i in range(80)]
        for event in many:
            event.synchronize()
        assert torch.equal(read(running, stored, 0, 8000), torch.cat([random_bytes(100, i) for i in range(80)]))


@pytest.mark.parametrize("bad", ["flipped", "stale", "torn", "misdirected"])
def test_other_bytes_than_were_written_raise(tmp_path, bad):
    files = Faulty()
    with engine_on(tmp_path, files=files) as running:
        stored = running.store("weight", 4 * CHUNK)
        running.write(stored, random_bytes(4 * CHUNK, 1)).synchronize()
        faults = {
            "stale": lambda real, handle, buffers, offset: len(buffers[0]),  # the disk only says that it has written
            "torn": lambda real, handle, buffers, offset: (at_most(PAGE)(real, handle, buffers, offset), CHUNK)[1],
            "misdirected": lambda real, handle, buffers, offset: real(handle, buffers, (offset + CHUNK) % (4 * CHUNK)),
        }
        if bad == "flipped":
            files.faults["preadv"] = once(flipped, skip=1)
        else:
            files.faults["pwritev"] = once(faults[bad], skip=1)
            running.write(stored, random_bytes(4 * CHUNK, 2)).synchronize()
        with pytest.raises(
            StorageError, match=r"offmate-.* does not hold what was written, between offsets \d+ and .*weight"
        ):
            read(running, stored)


def test_a_bad_chunk_is_noticed_before_a_part_of_it_is_written_again(tmp_path):
    files = Faulty()
    with engine_on(tmp_path, files=files) as running:
        stored = running.store("weight", CHUNK)
        running.write(stored, random_bytes(CHUNK)).synchronize()
        files.faults["preadv"] = once(flipped)
        with pytest.raises(StorageError, match="does not hold what was written"):
            running.write(stored, random_bytes(10), start=5).synchronize()


@pytest.mark.parametrize("fault", [once(interrupted), at_most(PAGE), once(at_most(PAGE + 100))])
def test_writes_that_do_less_are_made_again(tmp_path, fault):
    files = Faulty()
    with engine_on(tmp_path, files=files) as running:
        stored = running.store("weight", 3 * CHUNK + 11)
        files.faults["pwritev"] = fault
        running.write(stored, random_bytes(stored.n_bytes))
        assert torch.equal(read(running, stored), random_bytes(stored.n_bytes))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (refused(errno.EIO), r"writing .*offmate-.* at offset 8192 failed: Input/output error; .*dmesg"),
        (refused(errno.ENOSPC), "No space left on device; free space there"),
        (refused(errno.EFBIG), "File too large; .*ulimit -f"),
        (at_most(0), "stopped at offset 8192.* takes no more bytes"),
    ],
)
def test_a_failed_write_says_where_and_what_to_try_and_its_bytes_cannot_be_read(tmp_path, fault, words):
    files = Faulty()
    with engine_on(tmp_path, files=files, n_threads=1) as running:
        stored = running.store("weight", 4 * CHUNK)
        running.write(stored, random_bytes(4 * CHUNK, 1)).synchronize()
        files.faults["pwritev"] = once(fault, skip=1)
        with pytest.raises(StorageError, match=words):
            running.write(stored, random_bytes(4 * CHUNK, 2)).synchronize()
        assert torch.equal(read(running, stored, 0, CHUNK), random_bytes(4 * CHUNK, 2)[:CHUNK])
        with pytest.raises(StorageError, match=r"byte 8192 of weight was read .*, or writing it failed"):
            read(running, stored)
        running.write(stored, random_bytes(4 * CHUNK, 3))
        assert torch.equal(read(running, stored), random_bytes(4 * CHUNK, 3))


def test_a_chunk_that_was_lost_does_not_come_back_with_a_part_of_it(tmp_path):
    files = Faulty()
    with engine_on(tmp_path, files=files) as running:
        stored = running.store("weight", CHUNK)
        running.write(stored, random_bytes(CHUNK, 1)).synchronize()
        files.faults["pwritev"] = once(refused(errno.EIO))
        with pytest.raises(StorageError, match="Input/output error"):
            running.write(stored, random_bytes(100, 2), start=100).synchronize()
        running.write(stored, random_bytes(100, 3), start=100).synchronize()
        assert torch.equal(read(running, stored, 100, 100), random_bytes(100, 3))
        for start, n_bytes in ((0, 100), (200, 10)):
            with pytest.raises(StorageError, match=f"byte {start} of weight was read"):
                read(running, stored, start, n_bytes)


def test_a_transfer_fails_as_the_one_that_it_follows(tmp_path):
    files = Faulty()
    with engine_on(tmp_path, files=files) as running:
        stored, gate = running.store("weight", CHUNK), LaneEvent()
        files.faults["pwritev"] = refused(errno.EIO)
        running.write(stored, random_bytes(CHUNK), after=(gate,))
        follows = running.read(stored, torch.zeros(CHUNK, dtype=torch.uint8))
        gate.settle()
        with pytest.raises(StorageError, match="Input/output error"):
            follows.synchronize()


def test_what_a_disk_reports_at_closing_fails_the_write(tmp_path):
    files = Faulty()
    with engine_on(tmp_path, files=files) as running:
        stored = running.store("weight", CHUNK)
        files.faults["close"] = once(lambda real, handle: (real(handle), refused(errno.EDQUOT)(real))[0])
        with pytest.raises(StorageError, match=r"closing .* failed: Disk quota exceeded"):
            running.write(stored, random_bytes(CHUNK)).synchronize()


def test_without_o_direct_everything_reaches_the_disk_and_leaves_ram(tmp_path, caplog):
    files = Faulty(open=without_direct)
    with caplog.at_level(logging.WARNING, "offmate"), engine_on(tmp_path, files=files) as running:
        stored = running.store("weight", 4 * CHUNK)
        files.calls.clear()
        running.write(stored, random_bytes(4 * CHUNK))
        assert torch.equal(read(running, stored), random_bytes(4 * CHUNK))
        assert files.calls.count("fdatasync") == files.calls.count("pwritev") == 4
        assert files.calls.count("drop_cached") == 8
    assert len([record for record in caplog.records if "has no O_DIRECT" in record.message]) == 1


def test_a_failed_sync_is_a_failed_write(tmp_path):
    files = Faulty(open=without_direct)
    with engine_on(tmp_path, files=files) as running:
        stored = running.store("weight", CHUNK)
        files.faults["fdatasync"] = refused(errno.EIO)
        with pytest.raises(StorageError, match=r"writing .* failed: Input/output error"):
            running.write(stored, random_bytes(CHUNK)).synchronize()


def test_aligned_memory_is_not_copied(tmp_path, monkeypatch):
    copied = []
    monkeypatch.setattr(
        "offmate.runtime.storage.chunk_requests.copy", lambda target, source, n_bytes: copied.append(n_bytes)
    )
    with engine_on(tmp_path) as running:
        stored = running.store("weight", 4 * CHUNK + 5)
        memory = empty_aligned(stored.n_bytes).zero_()
        running.write(stored, memory).synchronize()
        running.read(stored, memory).synchronize()
        assert copied == [5, 5]  # the last chunk, which ends within a page


def test_a_file_that_was_removed_is_named(tmp_path):
    with engine_on(tmp_path) as running:
        stored = running.store("weight", CHUNK)
        running.write(stored, random_bytes(CHUNK)).synchronize()
        stored.files[0].unlink()
        with pytest.raises(StorageError, match=r"opening .*offmate-.* failed: No such file .* keep other programs out"):
            read(running, stored)


def test_open_files_do_not_add_up(tmp_path):
    with engine_on(tmp_path) as running:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(20):
            stored = running.store(f"weight {number}", CHUNK)
            running.write(stored, random_bytes(CHUNK)).synchronize()
            read(running, stored)
        assert len(os.listdir("/proc/self/fd")) == before


def test_what_was_done_is_counted_by_path(tmp_path):
    with engine_on(tmp_path / "a", tmp_path / "b") as running:
        stored = running.store("weight", 4 * CHUNK, proportions=[3, 1])
        running.write(stored, random_bytes(4 * CHUNK)).synchronize()
        read(running, stored, 0, 1)
        first, second = running.use()
        assert (first.name, second.name) == (str(tmp_path / "a"), str(tmp_path / "b"))
        assert (first.written_bytes, second.written_bytes) == (3 * CHUNK, CHUNK)
        assert (first.read_bytes, second.read_bytes) == (CHUNK, 0)
        assert first.busy_s >= max(first.read_busy_s, first.write_busy_s) > 0
        assert running.staging_bytes == 2 * 2 * CHUNK


def test_a_throttle_holds_reads_and_writes_together_to_one_rate(tmp_path):
    n_bytes = 10 * CHUNK
    with engine_on(tmp_path, throttles=[Throttle(n_bytes / 0.1, n_bytes / 0.1)]) as running:
        there, back = running.store("there", n_bytes), running.store("back", n_bytes)
        running.write(there, random_bytes(n_bytes)).synchronize()
        start_s = time.perf_counter()
        events = running.write(back, random_bytes(n_bytes)), running.read(there, random_bytes(n_bytes))
        for event in events:
            event.synchronize()
        assert time.perf_counter() - start_s >= 0.99 * 0.2


FAULTS = {
    "interrupted": interrupted,
    "refused": refused(errno.EIO),
    "nothing": at_most(0),
    "short": at_most(PAGE),
    "odd": at_most(PAGE + 1),
    "flipped": flipped,
    "stale": lambda real, handle, buffers, offset: len(buffers[0]),
    "elsewhere": lambda real, handle, buffers, offset: real(handle, buffers, (offset + PAGE) % (4 * CHUNK)),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(2))
@given(st.data())
def test_whatever_fails_a_read_raises_or_gives_what_was_written(tmp_path, data):
    n_bytes, files = 3 * CHUNK + 100, Faulty()
    with engine_on(tmp_path, files=files, n_threads=3) as running:
        stored, known = running.store("weight", n_bytes), {}
        for seed in range(data.draw(st.integers(1, 10))):
            start = data.draw(st.integers(0, n_bytes - 1))
            length = data.draw(st.integers(1, n_bytes - start))
            fault, skip = data.draw(st.sampled_from([None, *FAULTS])), data.draw(st.integers(0, 3))
            call = data.draw(st.sampled_from(["preadv", "pwritev"]))
            files.faults = {call: once(FAULTS[fault], skip)} if fault else {}
            asked = range(start, start + length)
            if data.draw(st.booleans()):
                content = random_bytes(length, seed)
                try:
                    running.write(stored, content, start=start).synchronize()
                    known |= dict(zip(asked, content.tolist()))
                except StorageError:
                    known = {byte: value for byte, value in known.items() if byte not in asked}
            else:
                with contextlib.suppress(StorageError):
                    found = dict(zip(asked, read(running, stored, start, length).tolist()))
                    assert {byte: found[byte] for byte in asked if byte in known} == {
                        byte: known[byte] for byte in asked if byte in known
                    }


def test_bytes_can_be_asked_for_while_others_of_their_chunk_are_written(tmp_path):
    files, writing, go_on = Faulty(), threading.Event(), threading.Event()

    def held(real, *args):
        writing.set()
        assert go_on.wait(20)
        return real(*args)

    with engine_on(tmp_path, files=files) as running:
        stored = running.store("weight", CHUNK)
        running.write(stored, random_bytes(1000, 1), start=0).synchronize()
        files.faults["pwritev"] = held
        running.write(stored, random_bytes(1000, 2), start=1000)
        assert writing.wait(20)
        target = torch.zeros(1000, dtype=torch.uint8)
        asked = running.read(stored, target, start=0)
        go_on.set()
        asked.synchronize()
        assert torch.equal(target, random_bytes(1000, 1))
