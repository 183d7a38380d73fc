"""`offmate profile --storage`: drives are measured into the hardware file, and nothing is written unasked."""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path

import pytest
from offmate.runtime.storage import measure
from offmate.runtime.storage.files import SystemFiles

from offmate import cli
from offmate.cli.drives import _as_argument
from offmate.machines import benchmark, drive_rates
from offmate.machines.drives import Drive
from offmate.machines.hardware import load

MACHINE = json.loads((resources.files("offmate") / "machines" / "emulated.json").read_text())
MACHINE["cpu_master_update_bytes_per_s"] = {"value": 1e9, "source": "a test"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A machine that takes no time to measure, and few bytes for its drives."""
    monkeypatch.setattr(benchmark, "measure_machine", lambda say, kind, masters: dict(MACHINE))
    monkeypatch.setattr(drive_rates, "PROBE_BYTES", 1 << 16)
    monkeypatch.setattr(drive_rates, "_MOST_BYTES", 8 << 20)
    monkeypatch.setattr(drive_rates, "_LEAST_BYTES", 1 << 20)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "nvme").mkdir()
    return tmp_path / "nvme"


def said(capsys) -> str:
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


def terminal(monkeypatch, answer: str) -> list[str]:
    """Let somebody answer; return what they are asked."""
    asked: list[str] = []

    def answered(words: str = "") -> str:
        asked.append(words)
        return answer

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answered)
    return asked


def test_rates_are_shown_and_stand_in_the_file(drive, tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.json"
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert cli.main(["profile", "--storage", str(drive), "--json", str(path)]) == 0
        text = capsys.readouterr().out
        assert all(len(line) <= columns for line in text.splitlines()) and "Drives, per second" in text
        assert "--sustained measures past it" in " ".join(text.split())
    (found,) = load(str(path)).drives
    assert found.folder == str(drive) and found.write_bytes_per_s > 0 and found.free_bytes > 0
    assert json.loads(path.read_text()) == MACHINE | {"storage": json.loads(path.read_text())["storage"]}
    assert list(drive.iterdir()) == []


def test_without_drives_the_file_is_as_before(tmp_path):
    path = tmp_path / "mine.json"
    assert cli.main(["profile", "--json", str(path), "--quiet"]) == 0
    assert json.loads(path.read_text()) == MACHINE


def test_a_drive_is_written_to_past_its_cache_when_somebody_agrees(drive, tmp_path, monkeypatch, capsys):
    seconds = iter([1e-3] * 100 + [4e-3] * 1000)
    real = measure._seconds

    def took(pieces, directions):
        real(pieces, directions)
        return next(seconds)

    monkeypatch.setattr(measure, "_seconds", took)
    asked = terminal(monkeypatch, "y")
    path = tmp_path / "mine.json"
    assert cli.main(["profile", "--storage", str(drive), "--sustained", "--json", str(path)]) == 0
    (words,) = asked
    assert f"--sustained writes at most 8 MiB (8.39 MB) to {drive}, and removes it afterwards" in words
    assert "rated for 1,200 TB" in words
    text = said(capsys)
    assert "writes fell from 32.8 MB/s to 8.19 MB/s within 3.62 MiB and stayed there" in text
    assert f"storage=offmate.StoragePath({str(drive)!r}, read='8.19MB/s', write='8.19MB/s', both='16.4MB/s')" in text
    (found,) = load(str(path)).drives
    assert found.write_bytes_per_s == 8192e3
    assert "sustained: writes fell" in json.loads(path.read_text())["storage"][0]["write_bytes_per_s"]["source"]
    assert list(drive.iterdir()) == []


def test_several_drives_are_one_argument():
    one, other = Drive("/a", 2e9, 1e9, 1.5e9), Drive("/b", 4e9, 3e9, 3.5e9)
    first = "offmate.StoragePath('/a', read='2GB/s', write='1GB/s', both='1.5GB/s')"
    second = "offmate.StoragePath('/b', read='4GB/s', write='3GB/s', both='3.5GB/s')"
    assert _as_argument([one]) == f"storage={first}"
    assert _as_argument([one, other]) == f"storage=[{first}, {second}]"


def test_nothing_is_written_when_the_answer_is_no_or_nobody_answers(drive, monkeypatch, capsys):
    monkeypatch.setattr(drive_rates, "sustained_rates", None)
    argv = ["profile", "--storage", str(drive), "--sustained"]
    terminal(monkeypatch, "n")
    assert cli.main(argv) == 1
    assert "stopped; nothing was measured" in said(capsys)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert cli.main(argv) == 2
    text = said(capsys)
    assert "writes at most 8 MiB" in text and "Add --yes" in text


def test_an_interrupt_leaves_nothing(drive, monkeypatch, capsys):
    real, left = measure._seconds, iter([1.0] * 20)

    def interrupted(pieces, directions):
        real(pieces, directions)
        return next(left, None) or interrupt()

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "_seconds", interrupted)
    assert cli.main(["profile", "--storage", str(drive), "--sustained", "--yes"]) == 130
    assert list(drive.iterdir()) == []


def test_drives_that_cannot_be_measured(drive, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    other.mkdir()
    for folders, words in (
        ([tmp_path / "absent"], "absent is not a folder; make it, or name another one"),
        ([drive, drive], "are the same folder; name each one once"),
        ([drive, other], "are on the same disk"),
        (["3GB/s"], "is a rate, and a folder on that drive is needed"),
    ):
        argv = [word for folder in folders for word in ("--storage", str(folder))]
        assert cli.main(["profile", *argv]) == 2
        assert words in said(capsys)
    assert cli.main(["profile", "--sustained"]) == 2
    assert "name a folder: --storage DIR" in said(capsys)
    monkeypatch.setattr(SystemFiles, "free_bytes", lambda self, path: 1000)
    assert cli.main(["profile", "--storage", str(drive)]) == 2
    assert "1000 B are free in" in said(capsys)
