"""What a run is made from: a base model or data that change between a stop and a resume are noticed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offmate import cli
from offmate.finetune.settings import make_settings
from offmate.finetune.sources import (
    Sources,
    changes_of_data,
    check_description,
    check_weights,
    data_marks,
    read_sources,
    with_model,
)
from offmate.finetune.weights import load_model, model_folder

from .finetune_kit import TEXT, arguments, finetune, losses, make_models, refused, stop_after

STEPS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models."""
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture
def base(models: Path, tmp_path: Path) -> Path:
    """A folder with a model and a text, which a test may change."""
    shutil.copytree(models / "llama", tmp_path / "llama")
    (tmp_path / "text.txt").write_text(TEXT[:10_000])
    return tmp_path


@pytest.fixture(autouse=True)
def _one_cache(monkeypatch: pytest.MonkeyPatch, cache_dir: str) -> None:
    monkeypatch.setenv("OFFMATE_CACHE_DIR", cache_dir)


def usual(base: Path, **more: object) -> list[str]:
    settings = {"steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 1, "checkpoint_every": 2, "eval_fraction": 0}
    return arguments(base / "llama", base / "text.txt", base / "out", **(settings | {"yes": True} | more))


def begun(base: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, **more: object) -> None:
    """A run that was stopped after its first checkpoint."""
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert "stopped by the test" in refused(usual(base, **more), capsys)


def change_weights(base: Path, name: str, index: int) -> None:
    file = base / "llama" / "model.safetensors"
    values = load_file(file)
    values[name].view(-1)[index] *= 1.5
    save_file(values, file, {"format": "pt"})


def test_an_adapter_does_not_go_on_with_other_weights(base, monkeypatch, capsys):
    begun(base, monkeypatch, capsys, lora="r=4")
    whole = (base / "llama" / "model.safetensors").read_bytes()
    change_weights(base, "model.norm.weight", 7)  # a single element
    said = refused(usual(base, lora="r=4", resume=True), capsys)
    assert f"{base / 'llama' / 'model.safetensors'} has changed since the run began" in said
    (base / "llama" / "model.safetensors").write_bytes(whole)
    os.utime(base / "llama" / "model.safetensors", (1, 1))  # the time alone is no change
    assert len(losses(finetune(usual(base, lora="r=4", resume=True)))) == STEPS - 2
    change_weights(base, "model.norm.weight", 7)
    said = refused(["finetune", "--json", "--output", str(base / "out"), "--resume", "--merge"], capsys)
    assert "model.safetensors has changed since the run began" in said
    assert not (base / "out" / "merged").exists()


@pytest.mark.parametrize("lora", [None, "r=4"])
def test_a_description_that_changes_is_named_also_by_a_dry_run(base, monkeypatch, capsys, lora):
    begun(base, monkeypatch, capsys, lora=lora)
    config = base / "llama" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    for more in ({}, {"dry_run": True}):
        assert f"{config} has changed since the run began" in refused(usual(base, resume=True, **more), capsys)


def test_a_full_run_does_not_need_the_weights_that_it_began_with(base, monkeypatch, capsys):
    begun(base, monkeypatch, capsys)
    (base / "llama" / "model.safetensors").unlink()
    assert len(losses(finetune(usual(base, resume=True)))) == STEPS - 2


def test_a_run_of_an_older_version_says_that_it_cannot_know(base, monkeypatch, capsys, caplog):
    begun(base, monkeypatch, capsys, lora="r=4")
    (base / "out" / "sources.json").unlink()
    assert len(losses(finetune(usual(base, lora="r=4", resume=True)))) == STEPS - 2
    assert "kept no record of its base model" in caplog.text


def test_weights_and_sizes_are_compared_before_anything_is_read(base):
    folder, digests = base / "llama", {}
    load_model(folder, torch.float32, digests)
    settings = make_settings({"model": str(folder), "data": "d", "output": "o"})
    with_model(Sources(), settings, folder, digests).save(base)
    sources = read_sources(base)
    check_description(sources, folder, weights=True)
    (folder / "model.safetensors").write_bytes(b"short")
    check_description(sources, folder, weights=False)
    with pytest.raises(RuntimeError, match=r"model\.safetensors has changed"):
        check_description(sources, folder, weights=True)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(RuntimeError, match=r"chat_template\.jinja is new"):
        check_description(sources, folder, weights=False)


def test_weights_in_a_folder_of_their_own_are_compared(base):
    folder, digests = base / "llama", {}
    (folder / "parts").mkdir()
    (folder / "model.safetensors").rename(folder / "parts" / "one.safetensors")
    names = load_file(folder / "parts" / "one.safetensors")
    index = {"weight_map": dict.fromkeys(names, "parts/one.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load_model(folder, torch.float32, digests)
    settings = make_settings({"model": str(folder), "data": "d", "output": "o"})
    record = with_model(Sources(), settings, folder, digests)
    assert "parts/one.safetensors" in record.model
    check_weights(record, folder, digests)
    with pytest.raises(RuntimeError, match=r"one\.safetensors has changed"):
        check_weights(record, folder, dict.fromkeys(digests, "another"))


def test_a_model_of_the_hub_stays_at_its_revision(base, monkeypatch):
    asked = []

    def snapshot_download(model: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(revision)
        return str(base / "snapshots" / (revision or "newest"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    settings = make_settings({"model": "me/model", "data": "d", "output": "o"})
    record = with_model(Sources(), settings, model_folder("me/model"), {})
    assert record.revision == "newest"
    model_folder("me/model", revision=record.revision)
    assert asked == [None, "newest"]


@pytest.mark.parametrize("text", ["[]", "{", '{"revision": null, "model": {"a": 3}, "data": {}}'])
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / "sources.json").write_text(text)
    with pytest.raises(RuntimeError, match=r"sources\.json is damaged"):
        read_sources(tmp_path)


# -- data -------------------------------------------------------------------------------------------------------------


def test_changed_data_are_said_and_the_run_goes_on_with_its_tokens(base, monkeypatch, capsys):
    begun(base, monkeypatch, capsys)
    shutil.copytree(base / "out", base / "kept")
    expected = losses(finetune(usual(base, resume=True)))
    shutil.rmtree(base / "out")
    (base / "kept").rename(base / "out")
    (base / "text.txt").write_text(TEXT[5_000:9_000])
    events = finetune(usual(base, resume=True))
    (said,) = [event for event in events if event["event"] == "data"]
    assert said["changes"] == ["text.txt has changed"]
    assert "goes on with the tokens that it made" in said["message"]
    assert losses(events) == expected


def test_changed_data_without_tokens_are_refused_and_leave_none_behind(base, monkeypatch, capsys):
    begun(base, monkeypatch, capsys)
    shutil.rmtree(base / "out" / "tokens")
    (base / "text.txt").write_text(TEXT[5_000:9_000])
    said = refused(usual(base, resume=True), capsys)
    assert "have changed since the run began (text.txt has changed)" in said and "restore the data" in said
    (base / "text.txt").write_text(TEXT[:10_000])
    assert len(losses(finetune(usual(base, resume=True)))) == STEPS - 2


def test_each_file_that_changed_is_listed(tmp_path):
    for name in ("a", "b", "c", "same"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    record = Sources(data=data_marks(str(tmp_path)))
    assert changes_of_data(record, str(tmp_path)) == []
    (tmp_path / "a.txt").write_text("text A")
    (tmp_path / "b.txt").unlink()
    (tmp_path / "new.txt").write_text("text")
    os.utime(tmp_path / "same.txt", (1, 1))
    assert changes_of_data(record, str(tmp_path)) == ["new.txt is new", "a.txt has changed", "b.txt is missing"]
    shutil.rmtree(tmp_path)
    assert len(changes_of_data(record, str(tmp_path))) == 4
    assert changes_of_data(Sources(), str(tmp_path)) == []


# -- the result -------------------------------------------------------------------------------------------------------


def test_merging_leaves_the_files_of_others(base, capsys):
    out = base / "out"
    finetune(usual(base, lora="r=4", merge=True))
    again = ["finetune", "--json", "--output", str(out), "--resume", "--merge"]
    (out / "merged" / "mine.gguf").write_text("mine")
    weights = (out / "merged" / "model.safetensors").read_bytes()
    (out / "merged" / "model.safetensors").unlink()
    assert finetune(again)[-1]["event"] == "merged"
    assert (out / "merged" / "model.safetensors").read_bytes() == weights
    (out / "merged" / "config.json").write_text("{}")
    said = refused(again, capsys)
    assert "config.json has changed since the model was merged, so it is not replaced; move it away" in said
    assert (out / "merged" / "config.json").read_text() == "{}"
    (out / "merged" / "manifest.json").unlink()
    assert "holds no merged model of this run" in refused(again, capsys)
    assert (out / "merged" / "mine.gguf").read_text() == "mine"


def test_a_file_with_the_name_of_a_result_is_kept(base, monkeypatch, capsys):
    begun(base, monkeypatch, capsys)
    (base / "out" / "README.md").write_text("my notes")
    (base / "out" / "result").mkdir()
    (base / "out" / "tokens" / "mine").touch()
    assert cli.main(usual(base, resume=True)) == 0
    assert (base / "out" / "README.md.before-1").read_text() == "my notes"
    assert "offmate finetune" in (base / "out" / "README.md").read_text()
    assert [file.name for file in (base / "out" / "tokens").iterdir()] == ["mine"]
    assert (base / "out" / "result").is_dir()


def test_a_result_has_the_loss_of_its_last_step_even_if_it_was_killed_before_it(base, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr("offmate.finetune.job.save_result", None)  # fails
        with pytest.raises(TypeError):
            cli.main(usual(base))
    last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert last[-1]["event"] == "error" and "TypeError" in last[-1]["message"]
    assert losses(finetune(usual(base, resume=True))) == []
    assert f"last step's loss {losses(last)[-1]:.4f}" in (base / "out" / "README.md").read_text()
