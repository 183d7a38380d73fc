"""A library that is missing or broken is a sentence, where it is first needed. A child process meets the broken one."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import offmate
from offmate.errors import LibraryError, OffmateError
from offmate.libraries import LIBRARIES, check_installed, explained, load

from ..house.imports import ROOT

_SHARED = 'raise {error}("libfaked.so.1: cannot open shared object file: No such file or directory")\n'

_PLANS = """
import torch, offmate
model = torch.nn.Sequential(torch.nn.Linear(8, 32), {between}, torch.nn.Linear(32, 4))
inputs = (torch.ones(4, 8),)
try:
    plan = offmate.plan(model, "16MiB", example_inputs=inputs, device="emulated", config=offmate.Config({config}))
    {use}
except offmate.OffmateError as error:
    print("refused:", error)
"""


def plans(use: str = "pass", config: str = "cache_dir=None", between: str = "torch.nn.ReLU()") -> list[str]:
    return ["-c", _PLANS.format(use=use, config=config, between=between)]


_FINETUNE = ["-m", "offmate", "finetune", "--model", "m", "--data", "d.jsonl", "--output", "o", "--device", "emulated"]

# Per library: what needs it, as arguments of Python.
NEEDS = {
    "pulp": plans(config="cache_dir=None, solver='cbc'"),
    "highspy": plans(config="cache_dir=None, solver='highs'"),
    "networkx": plans(),
    "ortools": plans(between="torch.nn.GELU(), torch.nn.LayerNorm(32)"),  # a block with something to recompute
    "rich": ["-m", "offmate", "cards"],
    "transformers": ["-m", "offmate", "plan", "tiny-llama"],
    "peft": ["-m", "offmate", "plan", "tiny-llama", "--lora", "4"],
    "safetensors": _FINETUNE,
    "yaml": _FINETUNE,
    "datasets": [
        "-c",
        "from pathlib import Path\nfrom offmate import cli\nfrom offmate.finetune import data\n"
        "Path('a.parquet').write_bytes(b'x')\n"
        "arguments = cli._parser().parse_args(['cards'])\narguments.run = lambda _: list(data.pieces('a.parquet'))\n"
        "cli._parser = lambda _: type('P', (), {'parse_known_args': lambda *_: (arguments, [])})()\n"
        "cli.main(['cards'])",
    ],
    "matplotlib": plans(use="plan.plot_memory()"),
    "pandas": plans(use="plan.to_dataframe()"),
}


def faked(folder: Path, name: str, text: str) -> Path:
    """Put a package of that name into a folder; importing it runs the text."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    return folder


def run(arguments: list[str], first: Path, where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=where,
        env={"PYTHONPATH": str(first), "PATH": "", "OMP_NUM_THREADS": "1", "HOME": str(where), "HF_HUB_OFFLINE": "1"},
        timeout=180,
        check=False,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NEEDS)
def test_a_broken_library_is_a_sentence(name, tmp_path):
    error = "OSError" if name in ("pulp", "rich", "peft") else "ImportError"
    done = run(NEEDS[name], faked(tmp_path / "first", name, _SHARED.format(error=error)), tmp_path)
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    assert f"{name} is installed, but it cannot be loaded ({error}: libfaked.so.1" in said, said
    assert f"it {LIBRARIES[name].does}. Try: pip install --force-reinstall" in said
    assert "the shared library that the error names" in said


def test_without_highs_and_without_cbc_both_are_named(tmp_path):
    for name in ("highspy", "pulp"):
        first = faked(tmp_path / "first", name, _SHARED.format(error="ImportError"))
    said = run(plans(), first, tmp_path).stdout
    assert said.startswith("refused: no plan can be made: there is no solver: highspy is installed, but")
    assert "And pulp is installed, but" in said


def test_a_plan_needs_no_pulp_and_a_start_needs_nothing(tmp_path):
    first = faked(tmp_path / "first", "pulp", "raise ImportError('never asked')\n")
    assert run(plans(use="print('planned')"), first, tmp_path).stdout == "planned\n"
    for name in ("rich", "torch", "networkx", "ortools", "highspy", "yaml", "numpy"):
        faked(first, name, "raise ImportError('never asked')\n")
    for arguments in (["-c", "import offmate; dir(offmate)"], ["-m", "offmate", "--version"], ["-m", "offmate", "-h"]):
        done = run(arguments, first, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


def test_every_library_is_one_that_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {"": project["dependencies"], **project["optional-dependencies"]}
    bare = {extra: {re.split(r"[^\w-]", line)[0] for line in lines} for extra, lines in asked.items()}
    for name, library in LIBRARIES.items():
        if name in ("numpy", "tokenizers"):  # torch and transformers bring these
            continue
        assert (library.pip or name).strip("'").split("<")[0] in bare[library.extra], name
    assert bare[""] <= set(LIBRARIES)


def test_a_missing_library_says_what_it_is_for():
    with pytest.raises(LibraryError, match=r'^peft is not installed; it makes LoRA adapters\. Try: .*finetune\]"$'):
        _absent("peft")
    assert issubclass(LibraryError, OffmateError) and issubclass(LibraryError, ImportError)
    check_installed("torch")


def _absent(name):
    sys.modules, kept = {**sys.modules, name: None}, sys.modules
    try:
        load(name)
    finally:
        sys.modules = kept


def test_completion_shows_what_is_public_before_its_first_use():
    code = "import sys, offmate; print(*dir(offmate)); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {*offmate.__all__, "errors", "runtime", "solver"}


def test_other_errors_are_not_explained():
    with pytest.raises(OSError) as absent:
        Path("/no/such/file").read_text()
    assert explained(absent.value) is None
    with pytest.raises(ModuleNotFoundError) as caught:
        load("no_such_module")
    assert not isinstance(caught.value, LibraryError)
