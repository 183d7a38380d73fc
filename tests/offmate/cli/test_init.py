"""`offmate init` prints every setting of finetune, with what it means, in a file that finetune takes."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from offmate import cli
from offmate.cli.finetune import settings_options
from offmate.finetune.settings import Settings, make_settings

from ..finetune.finetune_kit import TEXT, make_models

NEEDED = {"model": "m", "data": "d", "output": "o"}
FIELDS = [field.name for field in dataclasses.fields(Settings)]


def printed(capsys, *argv: str) -> str:
    assert cli.main(["init", *argv]) == 0
    return capsys.readouterr().out


def test_every_setting_is_there_once_with_its_default(capsys):
    values = yaml.safe_load(printed(capsys))
    assert sorted(values) == sorted(FIELDS)
    assert [values[name] for name in NEEDED] == [None] * 3
    assert make_settings({**values, **NEEDED}) == make_settings(NEEDED)


def test_every_setting_is_explained_by_the_words_of_the_command_line(capsys):
    text = printed(capsys)
    _, known = settings_options()
    assert known.keys() == set(FIELDS), "an option for every setting, with help"
    for paragraph in text.split("\n\n"):
        *comment, last = paragraph.splitlines() or [""]
        name = last.partition(":")[0]
        if name in FIELDS:
            said = " ".join(line.removeprefix("# ") for line in comment)
            assert said == known[name]
    assert all(len(line) <= 100 for line in text.splitlines())


def test_what_is_given_is_printed(capsys):
    given = {**NEEDED, "data": "odd: [name].jsonl", "lora": "r=8,targets=q_proj+v_proj", "learning_rate": 1e-5}
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    values = yaml.safe_load(printed(capsys, *options, "--report", "wandb", "tensorboard", "--merge"))
    assert make_settings(values) == make_settings({**given, "report": ["wandb", "tensorboard"], "merge": True})


@pytest.mark.parametrize(
    ("options", "said"), [(("--lora", "x"), "lora is 'x'"), (("--gpu-budget", "12"), "did you mean 12GiB?")]
)
def test_a_value_that_cannot_be_is_refused(options, said, capsys):
    assert cli.main(["init", *options]) == 2
    assert said in capsys.readouterr().err


def test_finetune_takes_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OFFMATE_CACHE_DIR", str(tmp_path / "cache"))
    make_models(tmp_path)
    (tmp_path / "data.txt").write_text(TEXT[:4000])
    paths = ["--model", str(tmp_path / "llama"), "--data", str(tmp_path / "data.txt"), "--output", str(tmp_path / "o")]
    run = tmp_path / "run.yaml"
    run.write_text(printed(capsys, *paths, "--device", "emulated", "--gpu-budget", "64MiB", "--lora", "4"))
    assert cli.main(["finetune", "--config", str(run), "--dry-run"]) == 0
    assert "LoRA of rank 4" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "o").exists()
