"""Ways to train that run in processes of their own, whose memory is measured from outside."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

_SAMPLES_S = 0.02
_START, _STOP = "start to measure", "stop to measure"


class Memory(NamedTuple):
    """Bytes of a process in memory: its own, and those of files."""

    own_bytes: int
    file_bytes: int

    @staticmethod
    def of(process: int | str) -> Memory:
        """Return those of a process that runs, by its number."""
        text = Path(f"/proc/{process}/status").read_text()
        rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return Memory(*(int(rows[name].split()[0]) << 10 for name in ("RssAnon", "RssFile")))


def memory_now() -> dict[str, int]:
    """Return this process's bytes in memory, for its row: those before anything of the model is there."""
    return {f"before_{name}": value for name, value in Memory.of("self")._asdict().items()}


def start_to_measure() -> None:
    """Have the parent process measure the most memory that this one has from now on."""
    print(_START, flush=True)


def stop_to_measure() -> None:
    """End what `start_to_measure` has begun."""
    print(_STOP, flush=True)


def read_arguments(words: str | None, ways: Iterable[str], *, steps: int) -> argparse.Namespace:
    """Read a benchmark's command line: its folder, steps, file for figures, and in a process of its own its way.

    Parameters
    ----------
    words: say what it does. steps: that are usual.
    """
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=tuple(ways), help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_process(name: str, arguments: argparse.Namespace, way: str) -> dict[str, Any]:
    """Run a benchmark's way to train in a process of its own.

    Parameters
    ----------
    name: of the benchmark, which takes --way. arguments: its folder and number of steps.

    Returns: the row that it prints, with `own_bytes` and `file_bytes`: the most that it had while it was measured, less
        what `memory_now` found.
    Raises: CalledProcessError if it fails.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", "--dir", str(arguments.dir), "--way", way]
    found: dict[str, Any] = {}
    with subprocess.Popen([*command, "--steps", str(arguments.steps)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        peaks, most = _Peaks(child.pid), Memory(0, 0)
        for line in child.stdout:
            if line.strip() == _START:
                peaks.start()
            elif line.strip() == _STOP:
                most = peaks.stop()
            elif line.startswith("{"):
                found = json.loads(line)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    own = {name: value - found.pop(f"before_{name}") for name, value in most._asdict().items()}
    return found | own


class _Peaks:
    """The peaks of a process's memory, by samples."""

    def __init__(self, process: int) -> None:
        self._process, self._most, self._ends = process, Memory(0, 0), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> Memory:
        self._ends.set()
        self._thread.join()
        return self._most

    def _sample(self) -> None:
        while not self._ends.wait(_SAMPLES_S):
            self._most = Memory(*map(max, self._most, Memory.of(self._process)))
