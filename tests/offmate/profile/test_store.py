"""The cache never decides whether training runs: what cannot be read or written is left out, with a warning."""

import json
import logging

import pytest

import offmate
from offmate import Config, files
from offmate.planning import restore, subject
from offmate.profile import store
from offmate.profile.figures import measure_all

from ..loops import AMPLE, CPU_BUDGET, adamw, batch, tiny

pytestmark = pytest.mark.as_users

FILE_BODIES = ["", "{", "[]", "3", "null", '{"format": 7}', '{"format": 7, "body": {}, "sha256": 1}', "[" * 100_000]


def planned(folder, **settings):
    model = tiny()
    return offmate.plan(
        model, AMPLE, example_inputs=batch(0), optimizer=adamw(model), device="emulated", cpu_budget=CPU_BUDGET,
        config=Config(cache_dir=str(folder), **settings),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(store, "_kept", {})
    monkeypatch.setattr(files, "_complained_of", set())


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_folder_that_is_a_file(tmp_path, caplog):
    folder = tmp_path / "file"
    folder.write_text("here")
    assert planned(folder / "cache").schedule
    said = warnings(caplog)
    assert len(said) == 1 and "nothing is cached" in said[0] and "cache_dir" in said[0] and "Traceback" not in said[0]


def test_figures_are_measured_again_when_asked(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(subject, "measure_all", lambda *given: measured.append(1) or measure_all(*given))
    made = planned(tmp_path)
    assert planned(tmp_path).from_cache and len(measured) == 1
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    again = planned(tmp_path, measure_again=True)
    assert len(measured) == 2 and not again.from_cache and again.fingerprint == made.fingerprint
    assert before.keys() == set(tmp_path.iterdir()), "new figures take the place of old ones"
    assert {path.read_text() for path in tmp_path.glob("profile-*")}.isdisjoint(before.values())
    later = planned(tmp_path)
    assert later.from_cache and later.predicted_step_s == again.predicted_step_s and len(measured) == 2


def test_one_run_measures_once_however_often_it_plans(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(store, "_to_json", lambda measured: asked.append(1) or {})
    config = Config(cache_dir=str(tmp_path), measure_again=True)
    assert store.recall("a", str(tmp_path), config.figures_since_s) is None
    store.remember("a", str(tmp_path), measured := object())
    assert store.recall("a", str(tmp_path), config.figures_since_s) is measured
    assert store.recall("a", str(tmp_path), Config(measure_again=True).figures_since_s) is None
    assert Config(cache_dir=None).figures_since_s is None


def test_a_full_disk(tmp_path, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    assert planned(tmp_path).schedule
    assert [word for word in warnings(caplog) if "No space left on device" in word] == warnings(caplog) != []
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_skipped_and_written_again(tmp_path, caplog):
    made = planned(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    profile = next(tmp_path.glob("profile-*.json"))
    whole = profile.read_text()
    store._kept.clear()
    assert store.recall(profile.stem.removeprefix("profile-"), str(tmp_path)) is not None
    for body in [*FILE_BODIES, whole.replace("0", "1"), json.dumps({**json.loads(whole), "format": [8]})]:
        store._kept.clear()
        caplog.clear()
        profile.write_text(body)
        assert store.recall(profile.stem.removeprefix("profile-"), str(tmp_path)) is None
        assert "a cached profile is ignored" in warnings(caplog)[0]
    (tmp_path / f"{made.fingerprint}.json").write_text("[[")
    again = planned(tmp_path)
    assert again.fingerprint == made.fingerprint and not again.from_cache
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert planned(tmp_path).from_cache


def test_a_cached_plan_is_not_believed_by_its_name(tmp_path, caplog):
    made = planned(tmp_path)
    path = tmp_path / f"{made.fingerprint}.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "fingerprint": "another"}))
    assert not planned(tmp_path).from_cache
    assert "is for something else (fingerprint another)" in warnings(caplog)[0]
    caplog.clear()
    path.write_text(json.dumps({**data, "classes": {}}))
    assert not planned(tmp_path).from_cache
    assert "of the model's classes of blocks" in warnings(caplog)[0]


def test_a_folder_that_may_not_be_searched(tmp_path, caplog, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.Path, "read_text", refused)
    monkeypatch.setattr(restore.os.path, "exists", lambda _: False)
    assert store.recall("x", str(tmp_path)) is None
    assert "Permission denied" in warnings(caplog)[0]
