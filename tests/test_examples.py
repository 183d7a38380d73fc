"""Every example runs as it stands: the training scripts on a tiny model made on the spot."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NO_TRAINING = ("ask.py", "common.py", "three_blocks.py", "tiny_chat.py")
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in NO_TRAINING)
PAGE = EXAMPLES.parent / "docs" / "extending-the-solver.md"


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


def test_three_blocks_are_solved_as_the_page_says(tmp_path, monkeypatch, capsys):
    highspy = pytest.importorskip("highspy")
    monkeypatch.setattr(sys, "argv", ["three_blocks.py", "--lp", str(tmp_path / "three.lp")])
    runpy.run_path(str(EXAMPLES / "three_blocks.py"), run_name="__main__")
    said, page = capsys.readouterr().out.splitlines(), PAGE.read_text()
    # Of the schedules, the page shows one of several that are equally fast.
    proven = [line.partition(" s per step")[0] for line in said if "in fractions" in line]
    proven += [line for line in said if line.startswith(("least budget", "program of", "  with x"))]
    assert len(proven) == 8
    assert [line for line in proven if line not in page] == []

    reader = highspy.Highs()
    reader.setOptionValue("output_flag", False)
    assert reader.readModel(str(tmp_path / "three.lp")) == highspy.HighsStatus.kOk
    reader.run()
    units_of_ms = 9  # 9 s of computes that no plan avoids are 1000 units
    assert f"24 MB: in fractions {reader.getInfo().objective_function_value * units_of_ms / 1000:.2f}" in proven
