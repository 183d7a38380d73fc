"""`offmate check`: what it prints and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offmate.cli import main

_MODEL = """
import torch
def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
"""
_GOOD = _MODEL + "def batch():\n    return torch.randn(4, 8)\n"


def _check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["check", *arguments])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_a_file_with_a_model_and_a_batch_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(_GOOD)

    status, printed = _check(capsys, str(tmp_path / "mine.py"), "--json", str(tmp_path / "result.json"))

    assert status == 0
    assert "equal: all numbers are plain PyTorch's, bit for bit" in printed
    assert json.loads((tmp_path / "result.json").read_text())["outcome"] == "equal"


def test_a_loss_and_an_optimizer_of_ones_own_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = """
def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, torch.arange(4))
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
    (tmp_path / "mine.py").write_text(_GOOD + own)

    assert _check(capsys, str(tmp_path / "mine.py"), "--steps", "2")[0] == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (_MODEL, "defines no function batch()"),
        ("", "defines no function model() and no function batch()"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("def model(): return 1\ndef batch(): return {}", "model() in {path} returns a int; it must return a"),
        ("def model():\n    return name\ndef batch(): return {}", "model() in {path} failed, line 2: NameError:"),
        (
            "import torch\nmodel = torch.nn.Linear(8, 4)\ndef batch(): return torch.ones(8)",
            "model in {path} is a Linear; define a function that returns it",
        ),
        (
            _GOOD + "def optimizer(model): pass",
            "optimizer() in {path} returns a NoneType; it must return a torch.optim.Optimizer",
        ),
        ("import sys\nsys.exit(0)", "{path} failed: SystemExit: 0"),
        ("def model():\n    exit(0)\ndef batch(): return {}", "model() in {path} failed, line 2: SystemExit: 0"),
        (
            "import torch\none = torch.nn.Linear(8, 4)\ndef model(): return one\ndef batch(): return torch.ones(8)",
            "model() in {path} returns the same module again; every run needs a new one",
        ),
        (
            _MODEL + "def batch(): return 3",
            "batch() in {path} returns a int; it must return a dict of keyword arguments or a tuple of positional ones",
        ),
        (_GOOD.replace("4))\n", "4)).requires_grad_(False)\n"), "plain PyTorch fails: the model does not train"),
    ],
)
def test_a_file_that_cannot_be_checked(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)

    status, printed = _check(capsys, str(path))

    assert status == 2
    assert words.format(path=path).replace(" ", "") in "".join(printed.split())


def test_a_loss_that_returns_nothing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(_GOOD + "def loss(output, batch): pass")

    status, printed = _check(capsys, str(tmp_path / "mine.py"))

    assert status == 2
    assert "loss() in" in printed and "returns a NoneType" in printed


def test_a_model_that_takes_a_part_of_the_batch_is_called_as_the_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = """
def batch():
    return {"x": torch.randn(4, 8), "y": torch.tensor([0, 1, 2, 3])}
def call(model, batch):
    return model(batch["x"])
def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch["y"])
"""
    (tmp_path / "mine.py").write_text(_MODEL + own)

    assert _check(capsys, str(tmp_path / "mine.py"), "--steps", "2")[0] == 0


def test_a_device_that_does_not_exist_is_no_refusal_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(_GOOD)

    status, printed = _check(capsys, str(tmp_path / "mine.py"), "--device", "gpu")

    assert status == 2
    assert "refused" not in printed


def test_a_refusal_says_where_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forward = """
import torch
class Chosen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        h = self.layer(x)
        return h[h > 0].sum()
def model():
    return Chosen()
def batch():
    return {"x": torch.randn(4, 8)}
"""
    (tmp_path / "chosen.py").write_text(forward)

    status, printed = _check(capsys, str(tmp_path / "chosen.py"))

    assert status == 1
    assert "refused: offmate cannot train this model" in printed
    assert "within the ample budget: " not in printed and "h[h > 0]" in printed


def test_an_unknown_model_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = _check(capsys, "lama3-8b")
    assert status == 2
    assert "Did you mean llama3-8b" in printed
