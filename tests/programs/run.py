"""Runs a program plainly and with its added lines, each in a process and a folder of its own, and compares."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .child import RECORD
from .compare import differences
from .program import Program, find, with_lines

ROOT = Path(__file__).resolve().parents[2]
_SETTINGS = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Parameters
    ----------
    refused: the error with which offmate refused it, empty if it trained. differs: what is not equal bit for bit.
    plans: what was planned, a dictionary for every compiled model.
    """

    refused: str
    differs: tuple[str, ...]
    plans: tuple[dict[str, Any], ...]


Start = Callable[[list[str], Path, dict[str, str]], None]
"""Runs `tests.programs.child` with these arguments in a folder, with these variables in the environment."""


def start(argv: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Start a process of its own and wait for it.

    Raises: RuntimeError with the end of what it said if it failed.
    """
    environment = {**os.environ, **environment}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.programs.child", *argv]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    (folder / "said.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"{argv[0]} failed with exit code {done.returncode}: {done.stderr[-3000:]}")


def run(program: Program, work: Path, scripts: Path | None = None, start: Start = start) -> Outcome:
    """Run a program twice and compare what it left.

    Parameters
    ----------
    work: an empty folder, in which `plain` and `ours` are made. scripts: see `find`.

    Raises: FileNotFoundError if the script is not there; RuntimeError if a module is missing, or if the script fails
        with an error that is not offmate's.
    """
    script = find(program, scripts)
    missing = [module for module in program.needs if importlib.util.find_spec(module) is None]
    if missing:
        raise RuntimeError(f"{program.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    text = script.read_text()
    (work / "inputs").mkdir(parents=True)
    program.inputs(work / "inputs")
    records = []
    for name, lines in (("plain", ()), ("ours", program.lines)):
        folder = work / name
        shutil.copytree(work / "inputs", folder)
        (folder / script.name).write_text(with_lines(text, lines))
        for other in program.beside:
            shutil.copy(script.parent / other, folder)
        environment = {**_SETTINGS, "HF_HOME": str(work / "hub"), "OFFMATE_CACHE_DIR": str(work / "cache")}
        start([script.name, *shlex.split(program.arguments)], folder, environment)
        records.append(json.loads((folder / RECORD).read_text()))
    refused = records[1]["refused"]
    found = [] if refused else differences(work / "plain", work / "ours", work / "inputs")
    return Outcome(refused, tuple(found), tuple(records[1]["plans"]))
