"""Solves a problem in a process of its own: `python -m offmate.solver.own_process` is started by `Solving`.

It reads the problem and how to solve it from its standard input, and writes what was found to its standard output. It
ends with the process that has started it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from .plan import plan

_NICENESS = 19  # at 10, a step that keeps all cores busy took a third longer beside it
_LOOKS_S = 1.0  # between two looks at whether the parent is still there


def main() -> None:
    """Solve what the input has, and write the plan, or the words of an error."""
    let_training_go_first()
    parent, folder, problem, how = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    answer = os.dup(1)
    os.dup2(2, 1)  # solvers may write there
    try:
        found: object = plan(problem, **how)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    with os.fdopen(answer, "wb") as output:
        pickle.dump(found, output)
    os._exit(0)  # without waiting for the thread


def let_training_go_first() -> None:
    """Lower the priority of this process, and of its session if it leads one.

    Where the system schedules sessions as groups, the priority of a process counts only within its own session.
    """
    os.nice(_NICENESS)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # the system has no such groups
            Path("/proc/self/autogroup").write_text(str(_NICENESS))


def _end_with(parent: int, folder: str) -> None:
    """Once the parent has ended, end this process, with what it has started and with its folder for their files."""
    while os.getppid() == parent:
        time.sleep(_LOOKS_S)
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
