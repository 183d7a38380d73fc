"""Runs the programs and prints what came of each: `python -m tests.programs [WORDS ...] [--scripts FOLDER]`."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from offmate.sizes import format_bytes

from .program import Program
from .run import Outcome, run
from .table import PROGRAMS


def main() -> None:
    """Run those programs whose names contain one of the words, all of them without words."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORDS", help="run programs whose names contain these words")
    parser.add_argument("--scripts", type=Path, metavar="FOLDER", help="a folder with the repositories of the scripts")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what the programs write, in a new folder")
    arguments = parser.parse_args()
    for program in PROGRAMS:
        if arguments.words and not any(word.lower() in program.name.lower() for word in arguments.words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder) if arguments.keep is None else arguments.keep / program.name.replace(" ", "-")
            began_s = time.perf_counter()
            try:
                said = in_words(program, run(program, work, arguments.scripts))
            except (FileNotFoundError, RuntimeError, ValueError) as error:
                said = f"not run: {error}"
        print(
            f"{program.name} (+{len(program.lines)} lines, {time.perf_counter() - began_s:.0f} s): {said}", flush=True
        )


def in_words(program: Program, outcome: Outcome) -> str:
    """Say what came of a program."""
    if outcome.refused:
        return f"refused: {outcome.refused}"
    peaks = ", ".join(format_bytes(plan["peak_bytes"]) for plan in outcome.plans if plan) or "nothing planned"
    return f"{'; '.join(outcome.differs) or 'equal'} (peak {peaks})"


if __name__ == "__main__":
    main()
