"""States in files have their space before the first step, and move between paths while a model trains as ever."""

from __future__ import annotations

import errno
import functools
import logging
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from offmate.runtime.storage.disk_queue import DiskQueue
from offmate.runtime.storage.disk_rates import MeanRates
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.throttle import Throttle

import offmate
from offmate.session import state_storage

from ...runtime.storage.faulty import FAST, Faulty, refused
from .test_state_storage import KINDS, adamw, assert_same, batch, compiled, made, one_cache, small_requests, train

__all__ = ["one_cache", "small_requests"]  # the fixtures of that file


def use_engine(monkeypatch: pytest.MonkeyPatch, n_paths: int = 1, files: Faulty | None = None, **given: Any) -> None:
    throttles = [Throttle(FAST, FAST, shared=False) for _ in range(n_paths)]
    settings = {"throttles": throttles, "files": files, "n_threads": 2, "request_bytes": 1 << 13, **given}
    monkeypatch.setattr(state_storage, "Engine", functools.partial(Engine, **settings))


@pytest.fixture
def paths(tmp_path: Path) -> list[offmate.StoragePath]:
    """Two paths that are expected to be equally fast."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    return [offmate.StoragePath(tmp_path / name, "1GB/s", "1GB/s") for name in ("first", "second")]


def files_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.tensor"))


def store_of(model: Any) -> Any:
    return model._offmate_session.truth.host.store


def train_until_stored(pair: Any, plain: Any) -> None:
    assert train(*pair, range(2)) == train(*plain, range(2))
    assert sum(pair[0].offmate.plan.stored_bytes) > 0


# -- space before the first step --------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["adamw", "amsgrad", "momentum", "masters"])
def test_all_space_is_taken_before_the_first_update_and_no_more_afterwards(paths, tmp_path, monkeypatch, kind):
    from .test_state_storage import BUDGETS, CPU_BUDGET, GPU_BUDGET

    use_engine(monkeypatch, 2)
    make, dtype = KINDS[kind]
    gpu_budget, cpu_budget = BUDGETS.get(kind, (GPU_BUDGET, CPU_BUDGET))
    pair = compiled(paths, make, dtype, gpu_budget=gpu_budget, cpu_budget=cpu_budget)
    loss = pair[0](batch(0, dtype))["loss"]
    reserved = files_bytes(tmp_path)
    schedule = pair[0].offmate.plan.schedule
    needed = sum(schedule.item_bytes[i] for n in schedule.states_in_files for i in schedule.states.get(n, ()))
    assert reserved >= needed > 0
    loss.backward()
    pair[1].step()
    pair[1].zero_grad()
    train(*pair, range(1, 3), dtype)
    assert files_bytes(tmp_path) == reserved
    assert sum(path.stored_bytes for path in pair[0].offmate.storage) <= reserved


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_too_little_space_is_an_error_before_the_first_step_and_nothing_is_lost(paths, tmp_path, monkeypatch, code):
    faulty = Faulty()
    use_engine(monkeypatch, 2, faulty)
    pair, plain = compiled(paths), made()
    faulty.faults["fallocate"] = refused(code)
    before = [p.detach().clone() for p in pair[0].parameters()]
    for _ in range(2):
        with pytest.raises(offmate.StorageError, match=rf"{tmp_path}/first/offmate-.* needs .* are free in .*; free"):
            pair[0](batch(0))
    assert all(map(torch.equal, before, pair[0].parameters()))
    faulty.faults.clear()
    train_until_stored(pair, plain)
    assert_same(pair, plain)


@pytest.mark.parametrize("call", ["fallocate", "map"])
def test_files_that_cannot_be_made_are_an_error_before_the_first_step(paths, monkeypatch, call):
    faulty = Faulty()
    use_engine(monkeypatch, 2, faulty)
    pair, plain = compiled(paths), made()
    faulty.faults[call] = refused(errno.EIO)
    with pytest.raises(offmate.StorageError, match="Input/output error"):
        train(*pair, range(1))
    assert not pair[0]._offmate_session.truth.torn
    faulty.faults.clear()
    train_until_stored(pair, plain)
    assert_same(pair, plain)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB of its own; the test is skipped where it cannot be had."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system of its own: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False, capture_output=True)


def test_a_disk_that_another_program_fills_later_stops_nothing(small_disk):
    pair, plain = compiled(offmate.StoragePath(small_disk, "1GB/s", "1GB/s")), made()
    pair[0](batch(0))
    taken = bytearray()
    with (small_disk / "other").open("wb", buffering=0) as other, pytest.raises(OSError, match="No space left"):
        while True:
            taken.append(other.write(bytes(4096)) > 0)
    assert taken
    train_until_stored(pair, plain)
    assert train(*pair, range(2, 5)) == train(*plain, range(2, 5))
    assert_same(pair, plain)
    pair[0]._offmate_session.storage.close()


def test_a_disk_that_is_full_already_is_an_error_before_the_first_step(small_disk):
    pair = compiled(offmate.StoragePath(small_disk, "1GB/s", "1GB/s"))
    (small_disk / "other").write_bytes(bytes(11 << 19))
    with pytest.raises(
        offmate.StorageError, match=rf"{small_disk}/offmate-.* needs .* free in {small_disk} \(No space"
    ):
        train(*pair, range(1))
    pair[0]._offmate_session.storage.close()


def _unmounted(folder: Path) -> None:
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("vanish", [_unmounted, shutil.rmtree], ids=["unmounted", "removed"])
def test_a_folder_that_disappears_ends_training_by_name(small_disk, vanish):
    folder = small_disk / "states"
    folder.mkdir()
    pair = compiled(offmate.StoragePath(folder, "1GB/s", "1GB/s"))
    train(*pair, range(2))
    vanish(small_disk if vanish is _unmounted else folder)
    with pytest.raises(offmate.StorageError, match=rf"opening {folder}/offmate-.* failed: No such file.*keep other"):
        train(*pair, range(2, 4))
    with pytest.raises(offmate.OffmateError, match="Load a checkpoint"):
        train(*pair, range(4, 5))
    with pytest.raises(offmate.StorageError, match="No such file"):
        pair[0]._offmate_session.storage.close()


# -- moves while a model trains ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_states_that_move_at_random_are_plain_pytorchs_also_through_held_tensors(paths, monkeypatch, seed):
    use_engine(monkeypatch, 2)
    pair, plain = compiled(paths), made()
    train_until_stored(pair, plain)
    draw = random.Random(seed)
    held = [[state["exp_avg"] for state in optimizer.state.values()] for _, optimizer in (pair, plain)]
    for step in range(2, 9):
        store_of(pair[0]).move([draw.randrange(1, 5), draw.randrange(1, 5)])
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        if draw.random() < 0.5:
            pair[0].offmate.sync()
            assert all(map(torch.equal, *held))
            for own in held:
                own[step % len(own)].mul_(2)
            pair[1].state_dict()
    assert_same(pair, plain)
    assert all(map(torch.equal, *held))


def slowed(monkeypatch: pytest.MonkeyPatch, factors: dict[str, float]) -> None:
    """Let queues say that their disks took so many times as long as at 1 GB/s, by the folder's name."""

    def means(self: DiskQueue) -> MeanRates:
        seconds = factors.get(Path(self.name).name, 1.0)
        return MeanRates((0.0, 0.0, seconds), (0.0, 0.0, 1e9), 5e8, 5e8)

    monkeypatch.setattr(DiskQueue, "means", property(means))
    monkeypatch.setattr(DiskQueue, "iteration_done", lambda self: (means(self).seconds[2], means(self)))


def test_a_path_that_slows_down_gives_states_away_and_says_so(paths, monkeypatch, caplog):
    factors = {"first": 1.0, "second": 1.0}
    use_engine(monkeypatch, 2)
    slowed(monkeypatch, factors)
    pair, plain = compiled(paths), made()
    train_until_stored(pair, plain)
    caplog.set_level(logging.INFO, "offmate")
    factors["second"] = 2.0
    for step in range(2, 8):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
    first, second = pair[0].offmate.storage
    assert 1.8 < first.stored_bytes / second.stored_bytes < 2.2
    assert (first.folder.name, second.folder.name) == ("first", "second")
    assert (first.both_bytes_per_s, second.both_bytes_per_s) == (1e9, 5e8)
    said = [record.getMessage() for record in caplog.records if "storage paths share" in record.getMessage()]
    slower = [record.getMessage() for record in caplog.records if "times as long as planned" in record.getMessage()]
    assert len(said) == len(slower) == 1
    assert "second gives 477 MiB per second, and 954 MiB were planned" in slower[0] and "1.33 times" in slower[0]
    assert_same(pair, plain)


def test_new_plans_count_with_the_new_rates(paths, monkeypatch):
    factors = {"first": 1.0, "second": 1.0}
    use_engine(monkeypatch, 2)
    slowed(monkeypatch, factors)
    pair, plain = compiled(paths), made()
    train_until_stored(pair, plain)
    session = pair[0]._offmate_session
    assert session.request.storage.both_bytes_per_s == pytest.approx(2e9)
    factors["second"] = 2.0
    train(*pair, range(2, 4)), train(*plain, range(2, 4))
    for model, optimizer in (pair, plain):
        torch.manual_seed(5)
        model(batch(5, rows=8))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert session.request.storage.both_bytes_per_s == pytest.approx(1.5e9)
    assert_same(pair, plain)


def test_rates_that_hardly_change_change_no_plan(paths, monkeypatch):
    factors = {"first": 1.05, "second": 0.95}
    use_engine(monkeypatch, 2)
    slowed(monkeypatch, factors)
    pair = compiled(paths)
    train(*pair, range(2))
    session = pair[0]._offmate_session
    before = session.storage.files_for_plans(session.watch.parameters)
    train(*pair, range(2, 4))
    assert session.storage.files_for_plans(session.watch.parameters) == before


def test_without_storage_there_are_no_paths():
    pair = compiled(None, adamw, cpu_budget="1GiB")
    train(*pair, range(1))
    assert pair[0].offmate.storage == ()
