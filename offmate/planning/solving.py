"""A problem that another process solves while this one trains."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
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

    The process has a low priority. It ends, with the solvers that it has started and with their files, when nobody
    holds this object any more, and it ends with the process that has made it.

    State: `_answer`, bytes that the process has written, appended by a thread once it has ended.

    Parameters
    ----------
    how: time limit, gap and backend of `offmate.solver.plan.plan`.

    Raises: OSError, RuntimeError if the system starts no process or thread.
    """

    def __init__(self, problem: Problem, **how: Any) -> None:
        self._began_s = time.monotonic()
        self._answer: list[bytes] = []
        folder = tempfile.mkdtemp(prefix="offmate-solving-")
        # Where offmate is found here, it is found there, whatever is in the current folder.
        paths = os.pathsep.join(str(path) for path in sys.path if str(path))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "offmate.solver.own_process"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "TMPDIR": folder},
                start_new_session=True,  # Ctrl-C is for the training
            )  # fmt: skip
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.close = weakref.finalize(self, _end, self._process, folder, os.getpid())
        given = pickle.dumps((os.getpid(), folder, problem, how))
        threading.Thread(target=_hand_over, args=(self._process, given, folder, self._answer), daemon=True).start()

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
        except Exception:  # bytes that are no pickle raise whatever they happen to spell
            found = f"its process ended with status {self._process.poll()}"
        if not isinstance(found, Planned):
            raise SolverError(str(found))
        return found


def _hand_over(process: subprocess.Popen[bytes], given: bytes, folder: str, answer: list[bytes]) -> None:
    """Give the process its problem, and wait for its answer."""
    found = b""
    with contextlib.suppress(OSError):  # it has ended early, which its status says
        found, _ = process.communicate(given)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    answer.append(found)


def _end(process: subprocess.Popen[bytes], folder: str, owner: int) -> None:
    if os.getpid() != owner or process.poll() is not None:  # a forked child has no such process
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)
