"""Every example runs as it stands, on a tiny model made on the spot."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "common.py")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", SCRIPTS)
def test_example(script, tmp_path, monkeypatch, capsys):
    if script == "sft_trainer.py":
        pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFMATE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [script, "--steps", "4"])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    said = capsys.readouterr().out
    assert "budget 16 MiB, predicted peak" in said
    assert "loss" in said
