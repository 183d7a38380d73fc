"""The output folder of a run: files of the user's stay, and two runs never work in one folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offmate import cli
from offmate.errors import OffmateError
from offmate.finetune import forecast, job, lock, loop

from .finetune_kit import TEXT, arguments, finetune, losses, make_models, refused, stop_after

STEPS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and a text."""
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    (folder / "text.txt").write_text(TEXT[:10_000])
    return folder


@pytest.fixture(autouse=True)
def _one_cache(monkeypatch: pytest.MonkeyPatch, cache_dir: str) -> None:
    monkeypatch.setenv("OFFMATE_CACHE_DIR", cache_dir)


def usual(base: Path, output: Path, **more: object) -> list[str]:
    settings = {"steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 1, "checkpoint_every": 2, "eval_fraction": 0}
    return arguments(base / "llama", base / "text.txt", output, **(settings | {"yes": True} | more))


def events_of(capsys: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def during(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, act: Callable[[], Any]) -> None:
    """Do something just before a function of a run is called."""
    own = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        act()
        return own(*args, **kwargs)

    monkeypatch.setattr(module, name, call)


# -- what fails before it trains --------------------------------------------------------------------------------------


def test_files_that_look_like_drafts_are_the_users(base, tmp_path, capsys):
    output = tmp_path / "out"
    (output / "work.tmp").mkdir(parents=True)
    (output / "work.tmp" / "x").write_text("precious")
    (output / "notes.tmp").write_text("precious")
    before = contents(output)
    assert "exists already; name another folder" in refused(usual(base, output, gpu_budget="20KiB"), capsys)
    assert contents(output) == before


def test_a_start_that_fails_removes_what_it_made_and_no_more(base, tmp_path, monkeypatch, capsys):
    new, empty = tmp_path / "new" / "deep" / "out", tmp_path / "empty"
    empty.mkdir()
    for output in (new, empty):
        assert "least" in refused(usual(base, output, gpu_budget="20KiB"), capsys)
    assert list(tmp_path.iterdir()) == [empty] and list(empty.iterdir()) == []
    # A file that the user puts there while the run starts.
    during(monkeypatch, job, "_plan", lambda: (new / "notes").write_text("precious"))
    during(monkeypatch, job, "_load", lambda: (new / "tokens").is_dir() or pytest.fail("there are no tokens"))
    monkeypatch.setattr("offmate.finetune.job.Preview", None)  # fails
    with pytest.raises(TypeError):
        cli.main(usual(base, new))
    assert contents(tmp_path) == {"new/deep/out/notes": b"precious"}
    assert list((tmp_path / "new" / "deep" / "out").iterdir()) == [new / "notes"]


def test_a_second_run_is_refused_before_it_loads_anything(base, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    monkeypatch.setattr(job, "model_folder", lambda *_, **__: pytest.fail("it went on"))
    output.mkdir()
    with lock.locked(output):
        words = f"another run (process {os.getpid()}) is writing into {output}"
        assert words in refused(usual(base, output), capsys)
        (output / "finetune.yaml").write_text(f"model: m\ndata: d\noutput: {output}\n")
        assert words in refused(usual(base, output), capsys)
        assert words in refused(["finetune", "--output", str(output), "--resume"], capsys)
        assert (output / "finetune.yaml").is_file()


def test_a_run_that_ends_before_the_lock_is_taken_keeps_its_result(base, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"

    def other_run() -> None:
        for name in ("finetune.yaml", "config.json"):
            (output / name).write_text("of the other run")

    during(monkeypatch, lock, "locked", other_run)
    assert "exists already; continue it with --resume" in refused(usual(base, output), capsys)
    assert sorted(contents(output)) == ["config.json", "finetune.yaml"]


def test_a_lock_whose_file_was_removed_is_taken_again(tmp_path, monkeypatch):
    """As by a run that ended between opening the file and locking it."""
    own, removed = lock.fcntl.flock, []

    def flock(handle: int, how: int) -> None:
        own(handle, how)
        if not removed:
            removed.append(1)
            (tmp_path / ".lock").unlink()

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with lock.locked(tmp_path):
        monkeypatch.undo()
        with pytest.raises(OffmateError, match="another run"), lock.locked(tmp_path):
            pytest.fail("two runs at once")


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing_of_a_run_that_is_writing(base, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert "stopped by the test" in refused(usual(base, output), capsys)
    (output / "checkpoints" / ".step-00000004.tmp").mkdir()
    (output / "checkpoints" / ".step-00000004.tmp" / "model.safetensors").write_text("half of it")
    with lock.locked(output):
        before = contents(output)
        assert [event["event"] for event in finetune(usual(base, output, resume=True, dry_run=True))][-1] == "plan"
        assert contents(output) == before
        assert "another run" in refused(usual(base, output, resume=True), capsys)
        assert contents(output) == before
    finetune(usual(base, output, resume=True))
    assert not (output / "checkpoints" / ".step-00000004.tmp").exists()


# -- interruptions ----------------------------------------------------------------------------------------------------


def interrupts(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("module", "name"), [(forecast, "model_without_weights"), (job, "build_model")])
def test_an_interruption_before_training_leaves_nothing(base, tmp_path, monkeypatch, capsys, number, module, name):
    with monkeypatch.context() as patch:
        during(patch, module, name, interrupts(number))
        assert cli.main(usual(base, tmp_path / "out")) == 130
    captured = capsys.readouterr()
    words = "stopped before training, and what it made is removed; the same command begins again"
    assert captured.err.endswith(f"offmate: {words}\n")
    assert json.loads(captured.out.splitlines()[-1]) == {"event": "error", "message": words}
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_interrupted_start_of_a_resumed_run_says_how_to_go_on(base, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert "stopped by the test" in refused(usual(base, output), capsys)
    before = contents(output)
    during(monkeypatch, job, "build_model", interrupts(signal.SIGTERM))
    assert cli.main(usual(base, output, resume=True)) == 130
    assert f"stopped. Continue with: offmate finetune --output {output} --resume" in capsys.readouterr().err
    assert contents(output) == before


def test_asked_to_stop_in_its_last_step_a_run_ends_complete(base, tmp_path, monkeypatch, capsys):
    output, own = tmp_path / "out", loop._step

    def step(run: Any, number: int, *args: Any) -> Any:
        if number == STEPS - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return own(run, number, *args)

    monkeypatch.setattr(loop, "_step", step)
    assert cli.main(usual(base, output, eval_fraction=0.1, sample="Once", sample_tokens=8)) == 0
    events = events_of(capsys)
    (held_out,) = [e["loss"] for e in events if e["event"] == "evaluation" and e["step"] == STEPS]
    card = (output / "README.md").read_text()
    assert f"held-out loss {held_out:.4f}" in card
    assert "After 'Once' the model wrote" in card and [e for e in events if e["event"] == "sample"][-1]["step"] == STEPS


def test_asked_to_stop_in_an_evaluation_a_run_keeps_its_steps(base, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    asked = contextlib.ExitStack()  # only once
    asked.callback(interrupts(signal.SIGINT))
    with monkeypatch.context() as patch:
        during(patch, loop, "evaluate", asked.close)
        assert cli.main(usual(base, output, eval_fraction=0.1, eval_every=1, checkpoint_every=3)) == 130
    assert f"stopped: 1 of {STEPS} steps done" in capsys.readouterr().err
    assert len(losses(finetune(usual(base, output, eval_fraction=0.1, resume=True)))) == STEPS - 1


def test_a_checkpoint_is_reported_once_it_is_on_disk(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "evaluate", None)  # fails
    with pytest.raises(TypeError):
        cli.main(usual(base, tmp_path / "out", eval_fraction=0.1))
    said = events_of(capsys)[-2:]
    assert [event["event"] for event in said] == ["checkpoint", "error"]
    assert Path(said[0]["path"]).is_dir()
