"""Every failure of `offmate finetune --json` is one event on stdout and words on stderr, without a traceback."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from offmate import cli
from offmate.errors import LibraryError, OffmateError
from offmate.finetune import job, talk

ARGV = ["finetune", "--json", "--model", "m", "--data", "d", "--output"]


def failed(argv: list[str], capsys: Any) -> tuple[int, str]:
    """The exit status of a command that fails, and what its only event says, which stderr says, too."""
    try:
        status = cli.main(argv)
    except SystemExit as ended:  # argparse's
        status = ended.code
    captured = capsys.readouterr()
    (event,) = [json.loads(line) for line in captured.out.splitlines()]
    assert event["event"] == "error" and event["message"] in captured.err and "Traceback" not in captured.err
    return status, event["message"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["finetune", "--json", "--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["finetune", "--nonsense", "--json"], "unknown arguments: --nonsense"),
        (["finetune", "--js", "--quiet"], "not allowed with argument"),
        ([*ARGV, ""], "no output is given"),
        (["finetune", "--json", "--config", "none.yaml"], "no such configuration file"),
    ],
)
def test_arguments_that_cannot_be(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, message = failed(argv, capsys)
    assert status == 2 and said in message


def test_names_that_no_file_can_have(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "File name too long; check the path" in failed([*ARGV, "o" * 300], capsys)[1]
    Path("run.yaml").write_text('model: m\ndata: d\noutput: "a\\0b"\n')
    assert "a null byte" in failed(["finetune", "--json", "--config", "run.yaml"], capsys)[1]
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_library_that_does_not_load(capsys, monkeypatch):
    def lacks(*names: str) -> None:
        raise LibraryError("transformers is not installed")

    monkeypatch.setattr("offmate.cli.finetune.check_installed", lacks)
    assert failed([*ARGV, "o"], capsys) == (2, "transformers is not installed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_before_anything_is_loaded(capsys, monkeypatch, number):
    monkeypatch.setattr("offmate.cli.finetune.check_installed", lambda *_: os.kill(os.getpid(), number))
    assert failed([*ARGV, "o"], capsys) == (130, "interrupted")


def test_ctrl_c_before_the_arguments_are_known(capsys, monkeypatch):
    monkeypatch.setattr("offmate.cli._parser", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    assert failed([*ARGV, "o"], capsys) == (130, "interrupted")


def test_a_fault_of_offmate_is_an_event_before_its_traceback(capsys, monkeypatch):
    monkeypatch.setattr(job, "settings_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main([*ARGV, "o"])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"event": "error", "message": "unexpected ZeroDivisionError: division by zero"}


def test_without_events_stdout_stays_empty(capsys):
    assert cli.main(["finetune", "--output", ""]) == 2
    assert capsys.readouterr().out == ""


def test_an_end_of_input_is_no_consent(monkeypatch):
    def ends(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ends)
    monkeypatch.setattr(talk.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    with pytest.raises(OffmateError, match="stopped before training"):
        talk.Talk("normal", False, False).agree(["it is late"])
