"""Functions in a process of their own, forked from the one of the tests, in which nothing is to be imported again."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def forked(work: Callable[[], None]) -> int:
    """Call a function in a process of its own; return its exit code, 0 if it returned."""
    child = _fork(lambda tell: work())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def holding(work: Callable[[Callable[[], None]], None]) -> Iterator[int]:
    """Yield the number of a process once its function has said so; it is killed afterwards."""
    reads, writes = os.pipe()
    child = _fork(lambda tell: work(tell), writes)
    os.close(writes)
    try:
        assert os.read(reads, 1) == b"!", "the process ended before it had begun"
        yield child
    finally:
        os.close(reads)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _fork(work: Callable[[Callable[[], None]], None], says: int = -1) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(lambda: os.write(says, b"!") and None)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)
