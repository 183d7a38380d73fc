"""`offmate.save_checkpoint`: whole or not at all, with linked states, for models with and without offmate."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from offmate.runtime.storage.files import SystemFiles

import offmate
from offmate.errors import ArgumentTypeError, ArgumentValueError, OffmateError
from offmate.session import unfinished
from offmate.session.saved_files import digest_of

from ...runtime.storage.faulty import refused
from .test_state_storage import (
    STEPS,
    WIDTH,
    Deep,
    assert_same,
    batch,
    compiled,
    made,
    one_cache,
    path,
    small_requests,
    train,
)

__all__ = ["one_cache", "path", "small_requests"]  # fixtures


def kept(path: Any) -> list[Path]:
    """The folders with states that checkpoints have there."""
    folders = [one for one in Path(path.folder).rglob("*") if one.is_dir()]
    return [folder for folder in folders if not any(one.parent == folder for one in folders)]


@pytest.fixture
def saved(path: offmate.StoragePath, tmp_path: Path) -> Path:
    """A checkpoint of two steps, after which training went on."""
    pair = compiled(path)
    train(*pair, range(2))
    offmate.save_checkpoint(tmp_path / "two", *pair)
    train(*pair, range(2, 3))
    del pair
    gc.collect()  # another session may then store on the path
    return tmp_path / "two"


@pytest.mark.parametrize("plain", [False, True], ids=["with offmate", "without"])
def test_training_goes_on_bit_for_bit(path, saved, plain):
    assert len(kept(path)) == 1 and (saved / "states.json").is_file()
    pair, whole = made() if plain else compiled(path), made()
    offmate.load_checkpoint(saved, *pair)
    train(*pair, range(2, STEPS))
    train(*whole, range(STEPS))
    assert_same(pair, whole)


def test_what_plain_pytorch_saved_is_loaded_with_offmate(path, tmp_path):
    plain, pair = made(), compiled(path)
    train(*plain, range(2))
    offmate.save_checkpoint(tmp_path / "two", *plain)
    assert sorted(file.name for file in (tmp_path / "two").iterdir()) == ["checkpoint.json", "model.pt", "optimizer.pt"]
    offmate.load_checkpoint(tmp_path / "two", *pair)
    for model, optimizer in (pair, plain):
        train(model, optimizer, range(2, 4))
    assert_same(pair, plain)


def test_a_checkpoint_is_removed_with_its_files(path, saved, tmp_path):
    with pytest.raises(ArgumentValueError, match=r"two exists; name a new folder .* offmate.remove_checkpoint"):
        offmate.save_checkpoint(saved, *made())
    offmate.remove_checkpoint(saved)
    assert kept(path) == [] and [entry.name for entry in tmp_path.iterdir()] == ["disk"]
    with pytest.raises(ArgumentValueError, match=r"two is no checkpoint of offmate\.save_checkpoint"):
        offmate.remove_checkpoint(saved)


def test_a_folder_or_file_that_is_not_as_it_was_is_named(path, saved, tmp_path):
    (folder,) = kept(path)
    there = tmp_path / "there"
    Path(path.folder).rename(there)
    with pytest.raises(OffmateError, match=rf"two: optimizer states .* lie in {folder}, which is missing"):
        offmate.load_checkpoint(saved, *made())
    pair, whole = made(), made()
    offmate.load_checkpoint(saved, *pair, storage=[there])
    train(*whole, range(2))
    assert_same(pair, whole)
    file = next(iter((there / folder.relative_to(path.folder)).iterdir()))
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(OffmateError, match=rf"{file} is not as the checkpoint was written"):
        offmate.load_checkpoint(saved, *made(), storage=[there])
    os.truncate(file, 100)
    with pytest.raises(OffmateError, match=rf"{file} is too short: it has 100 bytes"):
        offmate.load_checkpoint(saved, *made(), storage=[there])


def test_a_checkpoint_that_fails_leaves_nothing_and_training_goes_on(path, tmp_path, monkeypatch):
    pair, plain = compiled(path), made()
    train(*pair, range(2))
    own, left = SystemFiles.link, [4]

    def link(self: SystemFiles, *paths: Path) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.EIO, "Input/output error")
        own(self, *paths)

    with monkeypatch.context() as patch:
        patch.setattr(SystemFiles, "link", link)
        with pytest.raises(OffmateError, match=r"linking .* failed: Input/output error"):
            offmate.save_checkpoint(tmp_path / "two", *pair)
    assert kept(path) == [] and [entry.name for entry in tmp_path.iterdir()] == ["disk"]
    train(*pair, range(2, 3))
    train(*plain, range(3))
    assert_same(pair, plain)


@pytest.mark.parametrize("way", ["in place", "data"])
def test_edits_before_a_checkpoint_and_between_two_are_in_it(path, tmp_path, way):
    pair, plain = compiled(path), made()

    def edit() -> None:
        for model, optimizer in (pair, plain):
            for param in model.parameters():
                state = optimizer.state[param]["exp_avg"]
                (state if way == "in place" else state.data).mul_(0.5)

    for model, optimizer in (pair, plain):
        train(model, optimizer, range(2))
    for name in ("one", "two"):
        edit()
        offmate.save_checkpoint(tmp_path / name, *pair)
        loaded = made()
        offmate.load_checkpoint(tmp_path / name, *loaded)
        assert_same(loaded, plain)
    for model, optimizer in (pair, plain):
        train(model, optimizer, range(2, STEPS))
    assert_same(pair, plain)


@pytest.mark.parametrize("count", [2, 7])
def test_after_a_checkpoint_without_memory_for_mappings_edits_still_reach_the_files(path, tmp_path, monkeypatch, count):
    pair, plain = compiled(path), made()
    for model, optimizer in (pair, plain):
        train(model, optimizer, range(2))
    own, left = SystemFiles.map, [count]

    def map_file(self: SystemFiles, *given: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        own(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(SystemFiles, "map", map_file)
        with pytest.raises(OffmateError, match="Cannot allocate memory"):
            offmate.save_checkpoint(tmp_path / "two", *pair)
    for model, optimizer in (pair, plain):
        for param in model.parameters():
            optimizer.state[param]["exp_avg"].mul_(0.5)
        train(model, optimizer, range(2, 4))
    assert_same(pair, plain)


FILES = ["checkpoint.json", "model.pt", "optimizer.pt", "states.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_checkpoint_that_is_missing_is_named(saved, name):
    assert sorted(os.listdir(saved)) == FILES
    (saved / name).unlink()
    with pytest.raises(OffmateError, match=rf"two/{name} is missing, and the checkpoint .*two needs it; copy it from"):
        offmate.load_checkpoint(saved, *made())


@pytest.mark.parametrize("name", FILES[1:])
def test_a_flipped_byte_is_not_loaded(saved, name):
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    pair, plain = made(), made()
    with pytest.raises(OffmateError, match=rf"two/{name} is not as it was written; copy it from"):
        offmate.load_checkpoint(saved, *pair)
    assert_same(pair, plain)


def test_a_checkpoint_of_an_earlier_version_is_loaded_and_removed(path, saved):
    """It has no manifest, and the digest of states.json in the optimizer's file."""
    (saved / "checkpoint.json").unlink()
    state = torch.load(saved / "optimizer.pt", weights_only=True)
    del state["offmate_manifest"]
    torch.save({**state, "offmate_states_sha256": digest_of(saved / "states.json")}, saved / "optimizer.pt")
    pair, whole = made(), made()
    offmate.load_checkpoint(saved, *pair)
    train(*whole, range(2))
    assert_same(pair, whole)
    offmate.remove_checkpoint(saved)
    assert kept(path) == [] and not saved.exists()


class Narrow(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = torch.nn.Linear(WIDTH, WIDTH, bias=False)


def other_pair(kind: str) -> tuple[Any, Any]:
    model = Narrow() if kind == "lacks" else made()[0]
    if kind == "shape":
        model.layers[2] = torch.nn.Linear(WIDTH, 2 * WIDTH)
    params = list(model.parameters())
    match kind:
        case "class":
            return model, torch.optim.SGD(params, lr=1e-2, momentum=0.9)
        case "groups":
            return model, torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:]}])
        case "order":
            return model, torch.optim.AdamW(params[::-1])
    return model, torch.optim.AdamW(params)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", r"layers\.2\.weight has shape \(192, 192\) in the checkpoint and \(384, 192\) in the model"),
        ("lacks", r"the checkpoint has layers\.3\.bias, which the model lacks"),
        ("class", "its optimizer is AdamW, and the one that is given is SGD"),
        ("groups", r"its optimizer has groups of \[16\] parameters, and the one that is given has groups of \[3, 13\]"),
        ("order", r"parameter 0 of its optimizer is layers\.0\.weight, and that of the one .* is layers\.7\.bias"),
    ],
)
def test_what_a_checkpoint_does_not_fit_stays_as_it_was(tmp_path, kind, words):
    trained = made()
    train(*trained, range(1))
    offmate.save_checkpoint(tmp_path / "one", *trained)
    torch.manual_seed(1)
    pair = other_pair(kind)
    before = copy.deepcopy(pair[0].state_dict())
    with pytest.raises(ArgumentValueError, match=rf"one does not fit, and nothing of it is loaded: {words}"):
        offmate.load_checkpoint(tmp_path / "one", *pair)
    assert not [name for name, value in pair[0].state_dict().items() if not torch.equal(value, before[name])]
    assert not pair[1].state_dict()["state"]


def test_only_a_model_and_the_optimizer_of_its_parameters_are_saved(tmp_path):
    model, optimizer = made()
    with pytest.raises(ArgumentTypeError, match="optimizer= is a NoneType and has to be a torch Optimizer"):
        offmate.save_checkpoint(tmp_path / "one", model, None)
    with pytest.raises(ArgumentTypeError, match="model= is a AdamW and has to be a torch Module"):
        offmate.save_checkpoint(tmp_path / "one", optimizer, model)
    for call in offmate.save_checkpoint, offmate.load_checkpoint:
        with pytest.raises(ArgumentValueError, match=r"group 0 .* of shape \(192, 192\) that the model does not have"):
            call(tmp_path / "one", model, made()[1])
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "checkpoint.json"])
def test_a_folder_of_somebody_elses_is_not_removed(tmp_path, name):
    other = tmp_path / "checkpoint-500"
    other.mkdir()
    (other / name).write_text("{}")
    with pytest.raises(OffmateError, match=r"checkpoint-500.* checkpoint of offmate\.save_checkpoint: "):
        offmate.remove_checkpoint(other)
    assert os.listdir(other) == [name]


def test_what_is_not_a_checkpoints_stays_and_a_link_is_not_followed(path, saved, caplog):
    (saved / "notes.txt").write_text("mine")
    link = saved.with_name("latest")
    link.symlink_to(saved)
    with pytest.raises(OffmateError, match=r"latest is a symbolic link to .*two; name that folder to remove it"):
        offmate.remove_checkpoint(link)
    assert sorted(os.listdir(saved)) == [*FILES[:2], "notes.txt", *FILES[2:]] and link.is_symlink()
    offmate.remove_checkpoint(saved)
    assert os.listdir(saved) == ["notes.txt"] and kept(path) == []
    assert "two stays, with what is not a checkpoint's: notes.txt" in caplog.text


@pytest.mark.parametrize("moved", ["the storage path", "what is in it"])
def test_a_checkpoint_whose_states_are_elsewhere_is_not_removed_without_them(path, saved, tmp_path, moved):
    there = tmp_path / "there"
    if moved == "what is in it":
        there.mkdir()
        (Path(path.folder) / "offmate-checkpoints").rename(there / "offmate-checkpoints")
    else:
        Path(path.folder).rename(there)
    with pytest.raises(OffmateError, match=r"which is missing.* now as storage= of offmate\.remove_checkpoint"):
        offmate.remove_checkpoint(saved)
    offmate.load_checkpoint(saved, *made(), storage=str(there))
    offmate.remove_checkpoint(saved, storage=offmate.StoragePath(there))
    assert not saved.exists() and not list(there.iterdir())


def test_without_the_file_that_says_where_states_are_nothing_is_removed(path, saved):
    (saved / "states.json").unlink()
    with pytest.raises(
        OffmateError, match=r"states\.json is missing, so that .* cannot be found\. Nothing was removed"
    ):
        offmate.remove_checkpoint(saved)
    assert len(kept(path)) == 1 and (saved / "model.pt").exists()


@pytest.mark.parametrize("on_disk", [0, 1])
def test_what_a_killed_process_left_of_a_checkpoint_goes_with_the_next_one(path, tmp_path, on_disk):
    """It is killed once its states are linked, or once the checkpoint is complete, which stays."""
    calls = ("SystemFiles.sync_folder = dies", "os.rename = lambda a, b: (rename(a, b), a.suffix == '.tmp' and dies())")
    code = f"""
import os, sys
from offmate.runtime.storage.files import SystemFiles
import offmate
from tests.offmate.session import test_state_storage as kit
offmate.session.state_storage.Engine = kit.functools.partial(kit.Engine, n_threads=2, request_bytes=1 << 14)
pair = kit.compiled({str(path.folder)!r})
kit.train(*pair, range(2))
rename = os.rename
def dies(*_):
    os.kill(os.getpid(), 9)
{calls[on_disk]}
offmate.save_checkpoint({str(tmp_path / "killed")!r}, *pair)
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == -9
    assert len(kept(path)) == 1 and len(list(tmp_path.glob(".killed.*"))) == 2 - on_disk

    pair = compiled(path)
    train(*pair, range(2))
    offmate.save_checkpoint(tmp_path / "next", *pair)
    assert not list(tmp_path.glob(".killed.*")) and len(kept(path)) == 1 + on_disk
    assert (tmp_path / "killed").is_dir() == bool(on_disk)
    for name in ["next", "killed"][: 1 + on_disk]:
        other, whole = made(), made()
        offmate.load_checkpoint(tmp_path / name, *other)
        train(*whole, range(2))
        assert_same(other, whole)


def test_a_checkpoint_that_is_being_written_is_left_alone(path, tmp_path):
    aside = unfinished.aside_of(tmp_path / "one")
    aside.mkdir()
    with unfinished.noted(aside, [Path(path.folder)]):
        unfinished.sweep(tmp_path)
        assert aside.is_dir() and len(list(tmp_path.glob(".one.*.links"))) == 1
    assert not list(tmp_path.glob(".one.*.links"))


def test_a_note_removes_nothing_that_no_checkpoint_has_made(path, tmp_path):
    """Somebody may have written it."""
    mine, run = tmp_path / "mine", "0123456789abcdef"
    folders = [mine, mine / "offmate-checkpoints" / run / "other", mine / "offmate-checkpoints" / "mine" / "one"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "precious").write_text("mine")
    (tmp_path / ".one.01234567.tmp").mkdir()
    (tmp_path / ".one.01234567.links").write_text(json.dumps([str(folder) for folder in folders]))
    unfinished.sweep(tmp_path)
    assert all((folder / "precious").is_file() for folder in folders)


def test_without_locks_checkpoints_are_written_too(path, tmp_path, monkeypatch):
    pair, whole = compiled(path), made()
    train(*pair, range(2))
    monkeypatch.setattr(unfinished.fcntl, "flock", refused(errno.ENOLCK))
    offmate.save_checkpoint(tmp_path / "two", *pair)
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    other = made()
    offmate.load_checkpoint(tmp_path / "two", *other)
    train(*whole, range(2))
    assert_same(other, whole)


def test_a_copy_is_removed_without_the_files_of_the_original(path, saved, tmp_path, caplog):
    shutil.copytree(saved, tmp_path / "copied")
    with caplog.at_level("WARNING", logger="offmate"):
        offmate.remove_checkpoint(tmp_path / "copied")
    assert f"copied is a copy of {saved}, which keeps the files on storage paths" in caplog.text
    assert not (tmp_path / "copied").exists() and len(kept(path)) == 1
    offmate.load_checkpoint(saved, *made())
    moved = saved.rename(tmp_path / "moved")
    offmate.remove_checkpoint(moved)
    assert kept(path) == [] and not moved.exists()


def test_checkpoints_are_written_by_one_thread_while_another_trains(path, tmp_path):
    pair, plain, saves, failed = compiled(path), made(), 6, []
    train(*pair, range(2))

    def save() -> None:
        try:
            for number in range(saves):
                offmate.save_checkpoint(tmp_path / str(number), *pair)
        except BaseException as error:
            failed.append(error)

    thread, steps = threading.Thread(target=save), 2
    thread.start()
    while thread.is_alive():
        train(*pair, range(steps, steps + 1))
        steps += 1
    assert not failed
    known = {}
    for step in range(steps):
        train(*plain, range(step, step + 1))
        known[step + 1] = copy.deepcopy((plain[0].state_dict(), plain[1].state_dict()))
    for number in range(saves):
        found, like = made(), made()
        offmate.load_checkpoint(tmp_path / str(number), *found)
        weights, states = known[int(found[1].state_dict()["state"][0]["step"])]
        like[0].load_state_dict(weights), like[1].load_state_dict(states)
        assert_same(found, like)


def test_a_disk_without_room_for_weights_is_named(tmp_path, monkeypatch):
    def full(content: Any, file: Path) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1408 vs 1302")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OffmateError, match=r"model.pt could not be written, and .*B are free on its disk"):
        offmate.save_checkpoint(tmp_path / "one", *made())
    assert list(tmp_path.iterdir()) == []


def test_a_mixture_of_updates_is_not_saved(path, tmp_path, monkeypatch):
    pair = compiled(path, cpu_budget=2_800_000)
    train(*pair, range(2))
    own, left = SystemFiles.pwritev, [7]

    def pwritev(self: SystemFiles, *given: Any) -> int:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.EIO, "Input/output error")
        return own(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(SystemFiles, "pwritev", pwritev)
        with pytest.raises(OffmateError, match="Input/output error"):
            train(*pair, range(2, 4))
    with pytest.raises(OffmateError, match=r"no checkpoint is written: after an earlier failure, "):
        offmate.save_checkpoint(tmp_path / "two", *pair)
    assert kept(path) == []


def test_a_removal_that_fails_can_be_repeated(path, saved, monkeypatch):
    own, left = SystemFiles.unlink, [3]

    def unlink(self: SystemFiles, one: Path) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.EIO, "Input/output error")
        own(self, one)

    with monkeypatch.context() as patch:
        patch.setattr(SystemFiles, "unlink", unlink)
        with pytest.raises(OffmateError, match=r"two cannot be removed: Input/output error\. Try it again"):
            offmate.remove_checkpoint(saved)
    offmate.remove_checkpoint(saved)
    assert kept(path) == [] and not saved.exists()


def full(self: SystemFiles, *given: Any) -> bool:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_behind_a_gate_an_update_without_room_loses_nothing(path, tmp_path, monkeypatch):
    gate = {"max_grad_norm": float("inf"), "gpu_budget": 2_000_000}
    pair, plain = compiled(path, **gate), made()
    for model, optimizer in (pair, plain):
        train(model, optimizer, range(2))
    assert any(pair[0].offmate.plan.stored_bytes)
    torch.manual_seed(2)
    pair[0](batch(2))["loss"].backward()
    with monkeypatch.context() as patch:
        patch.setattr(SystemFiles, "fallocate", full)
        with pytest.raises(OffmateError, match="free space there"):
            offmate.save_checkpoint(tmp_path / "two", *pair)
        with pytest.raises(OffmateError, match="no update was made, and all values are as they were: "):
            pair[1].step()
    pair[1].step()
    pair[1].zero_grad()
    train(*plain, range(2, 3))
    for model, optimizer in (pair, plain):
        train(model, optimizer, range(3, 5))
    assert_same(pair, plain)


def test_a_step_without_room_for_what_it_writes_loses_nothing(path, tmp_path, monkeypatch):
    """A checkpoint keeps all files, so that the next update writes to others."""
    pair, plain = compiled(path), made()
    train(*pair, range(2))
    train(*plain, range(2))

    with monkeypatch.context() as patch:
        patch.setattr(SystemFiles, "fallocate", full)
        with pytest.raises(OffmateError, match=r"free space there"):
            offmate.save_checkpoint(tmp_path / "two", *pair)
        for _ in range(2):
            with pytest.raises(OffmateError, match=r"no update was made, and all values are as they were: .*free in"):
                train(*pair, range(2, 3))
        assert_same(pair, plain)
    for model, optimizer in (pair, plain):
        train(model, optimizer, range(2, 5))
    assert_same(pair, plain)
    loaded, two = made(), made()
    offmate.load_checkpoint(tmp_path / "two", *loaded)
    train(*two, range(2))
    assert_same(loaded, two)
