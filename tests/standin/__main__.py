"""Compile the stand-in if need be, and run the tests over it: on a card of each architecture, then on two cards.

`python -m tests.standin [arguments of pytest]`, in an environment with PyTorch's CUDA build (`make standin` makes one).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

from .libraries import SOURCES, build

FOLDER = Path(__file__).parent
TWO_CARDS = FOLDER / "test_two_cards.py"
# What each run sees of the two cards, and its tests. What does not depend on the architecture runs on one.
RUNS = {
    "sm_86": ("0", [FOLDER, f"--ignore={TWO_CARDS}"]),
    "sm_90": ("1", [FOLDER / "test_attention.py", FOLDER / "test_budgets.py"]),
    "two cards": ("0,1", [TWO_CARDS]),
}


def preloaded() -> str:
    """Return the libraries to preload, compiled if the sources or torch have changed.

    Raises: SystemExit if torch is here without CUDA, or a library does not compile.
    """
    site = Path(sysconfig.get_path("purelib"))
    if not (site / "torch/lib/libtorch_cuda.so").exists():
        sys.exit(
            f"torch {version('torch')} in {sys.prefix} is built without CUDA, so that nothing can stand in for "
            "it. Linux wheels of the Python package index are built with CUDA; make .venv-standin anew from there."
        )
    into = Path(sys.prefix) / "standin"
    made_from, stamp = _made_from(), into / "stamp"
    if not stamp.exists() or stamp.read_text().splitlines()[0] != made_from:
        print("Compiling the stand-in for CUDA: half a minute ...", flush=True)
        try:
            libraries = build(site / "torch/lib", site / "nvidia/cu13/include", into)
        except subprocess.CalledProcessError as error:
            sys.exit(
                f"{Path(error.cmd[0]).name} failed with {error.returncode}, so that there is no stand-in to test on."
            )
        stamp.write_text("\n".join([made_from, ":".join(map(str, libraries))]))
    return stamp.read_text().splitlines()[1]


def _made_from() -> str:
    digest = hashlib.sha256(version("torch").encode())
    for path in (FOLDER / "libraries.py", *sorted(SOURCES.iterdir())):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main(arguments: list[str]) -> int:
    """Run the tests; 0 if all of them pass."""
    libraries = preloaded()
    failed = []
    for name, (cards, tests) in RUNS.items():
        print(f"{name}:", flush=True)
        environment = {**os.environ, "LD_PRELOAD": libraries, "CUDA_VISIBLE_DEVICES": cards}
        command = [sys.executable, "-m", "pytest", "--show-capture=no", *map(str, tests), *arguments]
        # Exit code 5: none of these tests was asked for.
        if subprocess.run(command, env=environment, check=False).returncode not in (0, 5):
            failed.append(name)
    if failed:
        print(f"Failed over the stand-in for CUDA: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
