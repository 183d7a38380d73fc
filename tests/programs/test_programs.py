"""Two of the programs train with their added lines, and give the numbers that they give without them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from .. import warm
from . import child
from .compare import differences
from .program import Line, Program, find, with_lines
from .run import run
from .table import PROGRAMS

NAMED = {program.name: program for program in PROGRAMS}


def _in(folder: Path, environment: dict[str, str], argv: list[str]) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    child.main(argv)


def _start(argv: list[str], folder: Path, environment: dict[str, str]) -> None:
    said = folder / "said.txt"
    assert warm.run(said, _in, folder, environment, argv) == 0, said.read_text()


@pytest.mark.parametrize("name", ["a loop after nanoGPT", "TRL: sft.py, LoRA, packed"])
def test_a_program_gives_its_own_numbers(name, tmp_path):
    program = NAMED[name]
    for module in program.needs:
        pytest.importorskip(module)
    outcome = run(program, tmp_path / "work", start=_start)
    assert not outcome.refused
    assert outcome.differs == ()
    assert [plan["peak_bytes"] for plan in outcome.plans] == [plan["predicted_peak_bytes"] for plan in outcome.plans]


def test_other_numbers_are_noticed(tmp_path):
    program = NAMED["a loop after nanoGPT"]
    other = dataclasses.replace(program, lines=(Line("model = Model()", "torch.manual_seed(1)"),))
    outcome = run(other, tmp_path / "work", start=_start)
    assert outcome.differs[0].startswith("losses differ from number 1 on")
    assert "tensors differ in ckpt.pt" in outcome.differs[1]
    given = tmp_path / "work" / "inputs"
    assert differences(tmp_path / "work" / "plain", tmp_path / "work" / "plain", given) == []


def test_a_refusal_is_an_outcome(tmp_path):
    program = NAMED["a loop after nanoGPT"]
    *_, last = program.lines
    small = dataclasses.replace(last, text=last.text.replace("2MiB", "2KiB"))
    outcome = run(dataclasses.replace(program, lines=(*program.lines[:-1], small)), tmp_path / "work", start=_start)
    assert "a budget of 2 KiB is too small" in outcome.refused


def test_lines_keep_the_indentation_of_the_line_that_they_follow():
    script = "if a:\n    b = 1\nc = 2\n"
    assert with_lines(script, (Line("b = 1", "d = 3"),)) == "if a:\n    b = 1\n    d = 3\nc = 2\n"
    with pytest.raises(ValueError, match="the script has no line 'e = 1', after which 'd = 3' is to be added"):
        with_lines(script, (Line("e = 1", "d = 3"),))


def test_what_a_program_asks_for(tmp_path):
    program = NAMED["nanoGPT: train.py"]
    with pytest.raises(FileNotFoundError, match=r"train.py of nanoGPT is not there.*--scripts FOLDER"):
        find(program, tmp_path)
    lacking = dataclasses.replace(NAMED["a loop after nanoGPT"], needs=("no_such_module",))
    with pytest.raises(RuntimeError, match="needs no_such_module: pip install no_such_module"):
        run(lacking, tmp_path)
    with pytest.raises(ValueError, match="has 4 added lines; at most 3 are meant to do"):
        Program("four", "here", "here/gpt_loop.py", (Line("a", "b"),) * 4, "", program.inputs)
