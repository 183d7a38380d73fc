"""A problem that another process solves while this one trains."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import SolverError
from ..solver.plan import Planned
from ..solver.problem import Problem


class Solving:
    """A problem on its way to a schedule, in a process of its own, since Python's lock would stop training.

    The process has a low priority. It ends when nobody holds this object any more, and with the process that has
    made it.

    State: `_answer`, bytes that the process has written, appended by a thread once it has ended.

    Parameters
    ----------
    how: time limit, gap and backend of `offmate.solver.plan.plan`.
    """

    def __init__(self, problem: Problem, **how: Any) -> None:
        self._began_s = time.monotonic()
        self._answer: list[bytes] = []
        # Where offmate is found here, it is found there, whatever is in the current folder.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offmate.solver.own_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,  # Ctrl-C is for the training
        )  # fmt: skip
        self.close = weakref.finalize(self, _end, self._process, os.getpid())
        given = pickle.dumps((problem, how))
        threading.Thread(target=_hand_over, args=(self._process, given, self._answer), daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether the process has ended."""
        return bool(self._answer)

    def rested(self, times: float) -> Callable[[], bool]:
        """Return what says whether so many times the seconds since it was started have passed from now on."""
        now_s = time.monotonic()
        until_s = now_s + times * (now_s - self._began_s)
        return lambda: time.monotonic() >= until_s

    def found(self) -> Planned:
        """Return what was found, once it is done. Raises: SolverError if the process has failed."""
        try:
            found = pickle.loads(self._answer[0])
        except (EOFError, pickle.UnpicklingError):
            found = f"its process ended with status {self._process.poll()}"
        if not isinstance(found, Planned):
            raise SolverError(found)
        return found


def _hand_over(process: subprocess.Popen[bytes], given: bytes, answer: list[bytes]) -> None:
    """Give the process its problem, and wait for its answer; its input stays open until then."""
    assert process.stdin is not None and process.stdout is not None
    found = b""
    try:
        process.stdin.write(given)
        process.stdin.flush()
        found = process.stdout.read()
    except OSError:  # it has ended early, which its status says
        pass
    process.wait()
    answer.append(found)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # a forked child has no such process
        process.kill()
