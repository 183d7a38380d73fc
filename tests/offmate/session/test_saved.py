"""`offmate.save_checkpoint`: whole or not at all, with linked states, for models with and without offmate."""

from __future__ import annotations

import errno
import gc
from pathlib import Path
from typing import Any

import pytest
from offmate.runtime.storage.files import SystemFiles

import offmate
from offmate.errors import ArgumentValueError, OffmateError

from .test_state_storage import STEPS, assert_same, compiled, made, one_cache, path, small_requests, train

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
    assert sorted(file.name for file in (tmp_path / "two").iterdir()) == ["model.pt", "optimizer.pt"]
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


@pytest.mark.parametrize(("damage", "words"), [("missing", "is missing"), ("changed", "is not as it was written")])
def test_without_the_file_that_says_where_states_are_nothing_is_loaded(saved, damage, words):
    if damage == "missing":
        (saved / "states.json").unlink()
    else:
        (saved / "states.json").write_text((saved / "states.json").read_text() + " ")
    with pytest.raises(OffmateError, match=rf"two/states\.json {words}, so that optimizer states .* cannot be found"):
        offmate.load_checkpoint(saved, *made())


def test_a_mixture_of_updates_is_not_saved(path, tmp_path, monkeypatch):
    pair = compiled(path)
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
