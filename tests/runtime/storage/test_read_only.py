"""Reads of files that belong to the user: every range, exact bytes, and every fault of the disk raises by name."""

from __future__ import annotations

import errno
import logging
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.host_bytes import empty_aligned
from offmate.runtime.storage.throttle import Throttle

from offmate.errors import ArgumentTypeError, ArgumentValueError, StorageError

from ...fuzz.examples import examples
from .faulty import (
    PAGE,
    Faulty,
    at_most,
    checkpoint,
    content,
    flipped,
    interrupted,
    once,
    random_bytes,
    refused,
    without_direct,
)


@pytest.fixture
def weights(tmp_path):
    return checkpoint(tmp_path / "model.safetensors")


def engine(files=None, **given):
    return Engine(files=files, **{"n_threads": 2, "request_bytes": 4 * PAGE, **given})


def read(running, file, start, n_bytes):
    target = torch.zeros(n_bytes, dtype=torch.uint8)
    running.read(file, target, start=start).synchronize()
    return target


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(2))
@given(st.data())
def test_any_range_is_the_bytes_of_the_file(weights, data):
    size = weights.stat().st_size
    start = data.draw(st.integers(0, size))
    n_bytes = data.draw(st.integers(0, size - start))
    shift = data.draw(st.sampled_from([0, 1, PAGE // 2]))
    target = empty_aligned(n_bytes, start + shift)
    with engine() as running:
        for _ in range(2):  # the second time, checksums are compared
            running.read(running.open(weights), target, start=start).synchronize()
            assert torch.equal(target, content(weights)[start : start + n_bytes])


def test_the_whole_file_needs_no_start(weights):
    with engine() as running:
        file = running.open(weights)
        target = torch.zeros(file.size_bytes, dtype=torch.uint8)
        running.read(file, target).synchronize()
        assert torch.equal(target, content(weights))
        with pytest.raises(ArgumentValueError, match=rf"has {file.size_bytes} bytes and the tensor 5; .* start="):
            running.read(file, target[:5])


@pytest.mark.parametrize("start", [-1, 200_000])
def test_a_range_that_is_not_there_is_refused(weights, start):
    with engine() as running, pytest.raises(ArgumentValueError, match=r"are not within .*model.safetensors"):
        running.read(running.open(weights), torch.zeros(1000, dtype=torch.uint8), start=start)


@pytest.mark.parametrize("target", [torch.zeros(8), torch.zeros(4, 4, dtype=torch.uint8), random_bytes(8)[::2]])
def test_only_flat_bytes_are_a_target(weights, target):
    with engine() as running, pytest.raises(ArgumentTypeError, match="contiguous tensor of one dimension"):
        running.read(running.open(weights), target, start=0)


def test_memory_that_lies_as_the_file_does_is_read_without_a_second_copy(weights, monkeypatch):
    copied = []
    monkeypatch.setattr(
        "offmate.runtime.storage.read_only.copy", lambda target, source, n_bytes: copied.append(n_bytes)
    )
    with engine() as running:
        file = running.open(weights)
        running.read(file, empty_aligned(8 * PAGE, 2 * PAGE), start=2 * PAGE).synchronize()
        assert copied == []
        running.read(file, empty_aligned(12 * PAGE, 77), start=77).synchronize()
        assert copied == [4 * PAGE - 77, 77]  # of the first request and of the last one
        copied.clear()
        running.read(file, empty_aligned(8 * PAGE + 1, 1)[1:], start=0).synchronize()
        assert sum(copied) == 8 * PAGE


def test_no_more_ram_than_stated_is_taken_for_staging(weights):
    with engine() as running:
        assert running.staging_bytes == 0
        running.open(weights)
        assert running.staging_bytes == 2 * 4 * PAGE


@pytest.mark.parametrize(
    "fault",
    [once(interrupted), once(interrupted, 3), at_most(PAGE), once(at_most(PAGE + 100))],
    ids=["interrupted", "interrupted later", "always short", "short and odd"],
)
def test_calls_that_do_less_are_made_again(weights, fault):
    files = Faulty()
    with engine(files) as running:
        file = running.open(weights)
        files.faults["preadv"] = fault
        assert torch.equal(read(running, file, 5, 100_000), content(weights)[5:100_005])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (refused(errno.EIO), r"reading .*model.safetensors at offset 16384 failed: Input/output error; .*dmesg"),
        (refused(errno.ESTALE), "Stale file handle; .*local disk"),
        (refused(errno.ENODEV), "No such device; check the disk"),
        (at_most(0), r"stopped at offset 16384, 16384 bytes before the end of the request: the file ends there"),
        (at_most(100), "stopped at offset 16484"),
    ],
)
def test_calls_that_fail_say_where_and_what_to_try(weights, fault, words):
    files = Faulty()
    with engine(files, n_threads=1) as running:
        file = running.open(weights)
        files.faults["preadv"] = once(fault, skip=1)
        target = torch.zeros(50_000, dtype=torch.uint8)
        done = running.read(file, target, start=0)
        with pytest.raises(StorageError, match=words):
            done.synchronize()
        assert done.done()
        assert torch.equal(read(running, file, 0, 50_000), content(weights)[:50_000])  # the others go on


@pytest.mark.parametrize("bad", ["flipped", "stale"])
def test_other_bytes_than_at_first_raise(weights, bad):
    files = Faulty()
    with engine(files) as running:
        file = running.open(weights)
        read(running, file, 0, 100_000)
        if bad == "flipped":
            files.faults["preadv"] = once(flipped, skip=2)
        else:
            times = weights.stat()
            with weights.open("r+b") as changed:
                changed.seek(50_000)
                changed.write(b"other")
            os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
            file.check()  # which cannot know
        with pytest.raises(StorageError, match=r"model.safetensors gave other bytes .* between offsets \d+ and \d+"):
            read(running, file, 0, 100_000)


def rewritten(path):
    path.write_bytes(path.read_bytes())


def shortened(path):
    os.truncate(path, path.stat().st_size - 10)


def replaced(path):
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def with_another_header(path):
    times = path.stat()
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.write(whole.replace(b"weight", b"height"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rewritten, "was written to"),
        (shortened, r"has \d+ bytes and not \d+, it was written to"),
        (replaced, "another file of the same name"),
        (with_another_header, "its header differs"),
        (lambda path: path.unlink(), "No such file or directory"),
    ],
)
def test_a_file_that_changes_is_noticed(weights, change, words):
    with engine() as running:
        file = running.open(weights)
        file.check()
        change(weights)
        with pytest.raises(StorageError, match=f"model.safetensors.*{words}"):
            file.check()


@pytest.mark.parametrize("whole", [b"", b"\x07\0\0", b"\xff" * 5000, (10**6).to_bytes(8, "little") + b"{}"])
def test_what_is_no_safetensors_file_is_refused(tmp_path, whole):
    path = tmp_path / "model.bin"
    path.write_bytes(whole)
    with (
        engine() as running,
        pytest.raises(StorageError, match=f"model.bin is not a safetensors file: it has {len(whole)}"),
    ):
        running.open(path)


def test_a_missing_file_is_named(tmp_path):
    with engine() as running, pytest.raises(StorageError, match=r"opening .*absent.safetensors failed: No such file"):
        running.open(tmp_path / "absent.safetensors")


def refuses_odd_requests(real, handle, buffers, offset):
    raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("faults", [{"open": without_direct}, {"preadv": once(refuses_odd_requests)}])
def test_without_o_direct_no_page_stays_in_ram(weights, faults, caplog):
    files = Faulty(**faults)
    with engine(files) as running, caplog.at_level(logging.WARNING, "offmate"):
        file, again = running.open(weights), running.open(weights)
        assert not file.direct
        files.calls.clear()
        assert torch.equal(read(running, file, 3, 100_000), content(weights)[3:100_003])
        assert files.calls.count("drop_cached") == files.calls.count("preadv") == 7
    assert again.path == weights
    assert [record.message.partition(" of ")[0] for record in caplog.records] == ["the file system"]


def test_a_disk_that_refuses_the_first_read_is_not_taken_for_one_without_o_direct(weights):
    files = Faulty(preadv=refused(errno.EIO))
    with engine(files) as running, pytest.raises(StorageError, match="Input/output error"):
        running.open(weights)


def test_files_of_one_disk_share_its_threads_and_a_throttle_is_a_disk(weights, tmp_path):
    other = checkpoint(tmp_path / "other.safetensors")
    slow = Throttle(1e6, 1e6)
    with engine() as running:
        for path, throttle in ((weights, None), (other, None), (weights, slow), (other, slow)):
            running.open(path, throttle)
        assert [use.name for use in running.use()] == [str(weights), str(weights)]


def test_what_was_read_is_counted(weights):
    with engine() as running:
        read(running, running.open(weights), 0, 40_000)
        (use,) = running.use()
        assert use.read_bytes == 40_960 and use.written_bytes == 0
        assert 0 < use.read_busy_s == use.busy_s and use.write_busy_s == 0
        assert use.read_bytes_per_s == use.read_bytes / use.read_busy_s and use.write_bytes_per_s == 0


def test_a_throttle_holds_reads_to_its_rate(weights):
    with engine() as running:
        file = running.open(weights, Throttle(400_000, 1))
        read(running, file, 0, 100_000)
        (use,) = running.use()
        assert use.busy_s >= use.read_bytes / 400_000 * 0.99
