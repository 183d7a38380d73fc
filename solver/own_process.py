"""Solves a problem in a process of its own: `python -m offmate.solver.own_process` is started by `Solving`.

It reads the problem and how to solve it from its standard input, and writes what was found to its standard output. It
ends with the process that has started it, which keeps the input open until then.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading

from .plan import plan

_NICENESS = 10  # training comes first


def main() -> None:
    """Solve what the input has, and write the plan, or the words of an error."""
    os.nice(_NICENESS)
    problem, how = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    answer = os.dup(1)
    os.dup2(2, 1)  # solvers may write there
    try:
        found: object = plan(problem, **how)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    with os.fdopen(answer, "wb") as output:
        pickle.dump(found, output)
    os._exit(0)  # without waiting for the thread


def _end_with_the_parent() -> None:
    while os.read(0, 1 << 16):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
