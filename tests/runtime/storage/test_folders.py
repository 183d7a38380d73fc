"""Folders belong to one process at a time, and nobody's files but the engine's own are touched."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.files import SystemFiles
from offmate.runtime.storage.folders import MARKER, Folder, StoragePath
from offmate.runtime.storage.throttle import Throttle

from offmate.errors import ArgumentTypeError, ArgumentValueError, StorageError

from .faulty import PAGE, Faulty, once, random_bytes, refused
from .forked import forked, holding

CHUNK = 2 * PAGE


def engine_on(*folders, **given):
    return Engine([StoragePath(folder) for folder in folders], **{"n_threads": 1, "request_bytes": CHUNK, **given})


def stored_and_waiting(folder):
    """What a process does that is killed: it has stored something."""

    def work(tell):
        running = engine_on(folder)
        running.write(running.store("weight", 3 * CHUNK), random_bytes(3 * CHUNK)).synchronize()
        tell()
        time.sleep(60)

    return work


def test_a_folder_that_another_process_stores_in_is_refused_and_its_process_is_named(tmp_path):
    with holding(stored_and_waiting(tmp_path)) as process:
        before = sorted(tmp_path.iterdir())
        with pytest.raises(StorageError, match=f"^process {process} stores in {tmp_path}; wait until it has ended"):
            engine_on(tmp_path)
        assert sorted(tmp_path.iterdir()) == before


def test_two_engines_of_one_process_do_not_share_a_folder(tmp_path):
    with engine_on(tmp_path), pytest.raises(StorageError, match=r"^another model of this process stores in"):
        engine_on(tmp_path)
    engine_on(tmp_path).close()


def test_a_folder_that_a_child_of_an_ended_process_holds_is_explained(tmp_path):
    """A fork inherits the lock."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    with engine_on(tmp_path):
        marker = tmp_path / MARKER
        marker.write_text(marker.read_text().replace(f"process {os.getpid()},", f"process {ended.pid},"))
        with pytest.raises(StorageError, match=rf"^process {ended.pid}, which stored in .*, has ended, but one that "):
            engine_on(tmp_path)


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "offmate-0123456789abcdef-000001.tensor").write_text("of another run, or mine")
    with holding(stored_and_waiting(tmp_path)):
        pass
    (left,) = set(tmp_path.glob("*.tensor")) - {tmp_path / "offmate-0123456789abcdef-000001.tensor"}
    run = left.name.split("-")[1]
    for name in (f"offmate-{run}-000001.tensor.bak", f"offmate-{run}-x.tensor", f"my-offmate-{run}-000001.tensor"):
        (tmp_path / name).write_text("mine")
    assert (tmp_path / MARKER).exists()
    mine = set(tmp_path.iterdir()) - {left, tmp_path / MARKER}
    with engine_on(tmp_path) as running:
        assert set(tmp_path.iterdir()) == mine | {tmp_path / MARKER}
        running.store("weight", CHUNK)
    assert set(tmp_path.iterdir()) == mine


@pytest.mark.parametrize("content", ["my own file", "offmate stores here: process 12, files *.tensor\n"])
def test_a_marker_that_is_somebody_elses_stays(tmp_path, content):
    (tmp_path / MARKER).write_text(content)
    with pytest.raises(StorageError, match=rf"\{MARKER} is not a file of offmate's; move it away"):
        engine_on(tmp_path)
    assert (tmp_path / MARKER).read_text() == content


def test_a_link_in_the_markers_place_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("")
    (tmp_path / MARKER).symlink_to(tmp_path / "mine")
    with pytest.raises(StorageError, match="cannot be stored in: Too many levels of symbolic links"):
        engine_on(tmp_path)
    assert (tmp_path / "mine").read_text() == ""


def test_an_empty_marker_is_of_a_process_that_was_killed_before_it_stored(tmp_path):
    (tmp_path / MARKER).touch()
    engine_on(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_marker_that_its_owner_removes_meanwhile_is_made_again(tmp_path):
    def removed(real, handle):
        real(handle)
        (tmp_path / MARKER).unlink()

    with engine_on(tmp_path, files=Faulty(lock=once(removed))), pytest.raises(StorageError, match="this process"):
        engine_on(tmp_path)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EACCES, "cannot be stored in: Permission denied; name a folder that you may write to"),
        (errno.EROFS, "cannot be stored in: Read-only file system"),
        (errno.ENOSPC, r"needs 200 B, and .* are free in"),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, code, words):
    with pytest.raises(StorageError, match=words):
        engine_on(tmp_path, files=Faulty(open=refused(code)))


def test_a_folder_that_is_none_is_named(tmp_path):
    (tmp_path / "file").touch()
    for name in ("absent", "file"):
        with pytest.raises(StorageError, match=f"/{name} is not a folder; make it"):
            engine_on(tmp_path / name)
    with pytest.raises(StorageError, match="/proc cannot be stored in: its file system makes no files"):
        engine_on(Path("/proc"))
    with pytest.raises(ArgumentTypeError, match="folder=3 is a int; give the path"):
        StoragePath(3)
    for nothing in ("", " "):
        with pytest.raises(ArgumentValueError, match=f"folder='{nothing}' names no folder"):
            StoragePath(nothing)


def test_rates_are_read_as_sizes_are():
    assert StoragePath("/mnt/disk", "6GB/s", 3e9).rates == (6e9, 3e9, pytest.approx(4e9))  # in turns
    assert StoragePath("/mnt/disk", "6GB/s", 3e9, both="9GB/s").rates == (6e9, 3e9, 9e9)
    assert StoragePath("/mnt/disk").rates is None
    with pytest.raises(ArgumentValueError, match="write: '7GB' is not a rate"):
        StoragePath("/mnt/disk", write="7GB")
    with pytest.raises(ArgumentValueError, match=r"read=7 of /mnt/disk is less than 1 MiB per second"):
        StoragePath("/mnt/disk", 7, 3e9)
    for partly, lacks in (({"read": 1e9}, "no write"), ({"write": 1e9}, "no read"), ({"both": 1e9}, "no read and no")):
        with pytest.raises(ArgumentValueError, match=rf"/mnt/disk has \w+=1000000000\.0 and {lacks}.*, or neither"):
            StoragePath("/mnt/disk", **partly)


@pytest.mark.parametrize("both", ["13GB/s", "1GB/s"])
def test_a_rate_of_both_that_no_disk_has_is_warned_of_once(caplog, both):
    for _ in range(2):
        assert StoragePath(f"/mnt/{both}", "7GB/s", "4GB/s", both).rates[2] == float(both[:-4]) * 1e9
    (record,) = caplog.records
    assert "which should be between half the slower one and their sum" in record.message


def test_a_folder_in_ram_is_warned_of_once(small_disk, tmp_path, caplog):
    for _ in range(2):
        engine_on(small_disk).close()
    (record,) = (record for record in caplog.records if "is in RAM" in record.message)
    assert record.message.startswith(f"{small_disk} is in RAM (tmpfs): ")


def test_a_folder_or_a_disk_given_twice_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    slow = [Throttle(1e9, 1e9), Throttle(1e9, 1e9)]
    with pytest.raises(ArgumentValueError, match=r"/a and .*/link are the same folder"):
        engine_on(tmp_path / "a", tmp_path / "link", throttles=slow)
    with pytest.raises(ArgumentValueError, match=r"/a and .*/b are on the same disk"):
        engine_on(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ArgumentValueError, match="1 throttles do not fit 2 paths"):
        engine_on(tmp_path / "a", tmp_path / "b", throttles=slow[:1])
    assert [list((tmp_path / name).iterdir()) for name in "ab"] == [[], []]
    engine_on(tmp_path / "a", tmp_path / "b", throttles=slow).close()


def test_a_path_that_fails_to_open_unlocks_the_others(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    slow = [Throttle(1e9, 1e9), Throttle(1e9, 1e9)]
    with engine_on(tmp_path / "b"), pytest.raises(StorageError, match="/b; delete that model"):
        engine_on(tmp_path / "a", tmp_path / "b", throttles=slow)
    engine_on(tmp_path / "a").close()


def test_a_file_that_cannot_be_removed_is_named_and_the_next_run_removes_it(tmp_path):
    files = Faulty()
    running = engine_on(tmp_path, files=files)
    running.store("weight", CHUNK)
    files.faults["unlink"] = refused(errno.EIO)
    with pytest.raises(StorageError, match=r"removing .*offmate-.*-000001.tensor failed: Input/output error"):
        running.close()
    assert len(list(tmp_path.iterdir())) == 2
    engine_on(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_files_on_a_hanging_disk_stay_for_the_next_run(tmp_path, caplog):
    ends = threading.Event()

    def hang(real, *args):
        assert ends.wait(20)
        return real(*args)

    files = Faulty()
    running = engine_on(tmp_path, files=files, deadline_s=0.2)
    stored = running.store("weight", CHUNK)
    files.faults["pwritev"] = hang
    with pytest.raises(StorageError, match="has done nothing"):
        running.write(stored, random_bytes(CHUNK)).synchronize()
    running.close()
    assert f"files stay in {tmp_path}" in caplog.text and len(list(tmp_path.iterdir())) == 2
    ends.set()


def test_a_removal_that_hangs_is_not_waited_for(tmp_path):
    ends = threading.Event()
    files = Faulty()
    running = engine_on(tmp_path, files=files, deadline_s=0.2)
    running.store("weight", CHUNK)
    files.faults["unlink"] = lambda real, path: ends.wait(20) and real(path)
    with pytest.raises(StorageError, match="removing stored files hangs"):
        running.close()
    ends.set()


def test_a_forked_process_removes_nothing(tmp_path):
    with engine_on(tmp_path) as running:
        stored = running.store("weight", CHUNK)
        assert forked(running.close) == 0
        running.write(stored, random_bytes(CHUNK)).synchronize()
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_nobody_needs_removes_its_files(tmp_path):
    running = engine_on(tmp_path)
    running.write(running.store("weight", CHUNK), random_bytes(CHUNK)).synchronize()
    del running
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_the_size_of_files_gives_a_short_write_and_then_an_error(tmp_path):
    def work():
        files = Faulty()
        running = engine_on(tmp_path, files=files)
        stored = running.store("weight", 4 * CHUNK)
        resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK + PAGE, CHUNK + PAGE))
        files.calls.clear()
        with pytest.raises(StorageError, match=f"at offset {CHUNK + PAGE} failed: File too large; .*ulimit -f"):
            running.write(stored, random_bytes(4 * CHUNK)).synchronize()
        assert files.calls.count("pwritev") == 3  # one whole, one short, one refused
        back = torch.zeros(CHUNK, dtype=torch.uint8)
        running.read(stored, back, start=0).synchronize()
        assert torch.equal(back, random_bytes(4 * CHUNK)[:CHUNK])
        with pytest.raises(StorageError, match="byte 8192 of weight"):
            running.read(stored, back, start=CHUNK)
        running.close()

    assert forked(work) == 0


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB of its own; the test is skipped where it cannot be had."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system of its own: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_small_disk_is_full_before_anything_is_written(small_disk, tmp_path):
    with engine_on(small_disk) as running:
        first = running.store("first", 1 << 19)
        with pytest.raises(StorageError, match=rf"{small_disk}/offmate-.* needs 1 MiB, and 5\d\d KiB are free in"):
            running.store("second", 1 << 20)
        running.write(first, random_bytes(1 << 19))
        back = torch.zeros(1 << 19, dtype=torch.uint8)
        running.read(first, back).synchronize()
        assert torch.equal(back, random_bytes(1 << 19))
    assert list(small_disk.iterdir()) == []
    (small_disk / "large").write_bytes(bytes(1 << 20))
    with pytest.raises(StorageError, match="needs 200 B, and 0 B are free in"):
        engine_on(small_disk)


def test_two_file_systems_are_two_disks(small_disk, tmp_path):
    with engine_on(small_disk, tmp_path) as running:
        stored = running.store("weight", 4 * CHUNK)
        assert {file.parent for file in stored.files} == {small_disk, tmp_path}


def test_a_read_only_file_system_is_named(small_disk):
    assert os.access(small_disk, os.W_OK)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StorageError, match="cannot be stored in: Read-only file system"):
        engine_on(small_disk)


def test_nothing_is_stored_after_the_end(tmp_path):
    """A thread that still trains while the process ends leaves no file behind."""
    folder = Folder(SystemFiles(), tmp_path, PAGE)
    folder.close()
    with pytest.raises(StorageError, match="its engine was closed"):
        folder.reserve(PAGE)
    assert not list(tmp_path.iterdir())
