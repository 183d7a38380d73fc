"""Checks the models of a list in forked processes, so that none can harm another."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from offmate.check.compare import Outcome, check
from offmate.errors import OffmateError
from tests.fuzz.lasting_cpsat import one_cpsat

from .lists import LISTS

# The outcomes of a census, the gravest first. The last three say nothing of offmate: nothing could be compared.
ORDER = ("different", "failed", "too long", "crashed", "refused", "equal", "unstable", "plain_fails", "not built")
_MOST_LETTERS = 600  # of a reason
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s,:`]*?/site-packages/|(?:[^/\s,:`]+/)+)")
_TOGETHER = 8  # cases that one process checks: to start one takes seconds


@dataclass(frozen=True)
class Row:
    """What was found of one name of a list.

    Parameters
    ----------
    outcome: one of `ORDER`. words: why, empty if the numbers are equal.
    """

    name: str
    outcome: str
    words: str
    seconds: float


def checked(list_name: str, names: list[str], processes: int, limit_s: float) -> Iterator[Row]:
    """Check the models of these names, and yield what was found as it comes.

    Parameters
    ----------
    limit_s: the most seconds that one model may take.
    """
    waiting = [names[start : start + _TOGETHER] for start in range(0, len(names), _TOGETHER)]
    running: list[_Child] = []
    while waiting or running:
        while waiting and len(running) < processes:
            running.append(_Child(list_name, waiting.pop(0), limit_s))
        select.select([child.lines for child in running], [], [], 1.0)
        for child in list(running):
            yield from child.read()
            if child.over:
                running.remove(child)
                left = child.ended()
                if left is not None:
                    yield left
                if child.names:
                    waiting.insert(0, child.names)


class _Child:
    """A forked process that checks some names one after another.

    State: the names that are left, and when the current one began; `read` changes them.
    """

    def __init__(self, list_name: str, names: list[str], limit_s: float) -> None:
        self.names, self._limit_s = list(names), limit_s
        self._began_s, self._rest, self._closed = time.perf_counter(), b"", False
        sys.stdout.flush()
        self.lines, told = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self.lines)
            _work(list_name, names, told)
        os.close(told)
        os.set_blocking(self.lines, False)

    @property
    def over(self) -> bool:
        """Whether the process has ended, or its current model takes too long."""
        return self._closed or time.perf_counter() - self._began_s > self._limit_s

    def read(self) -> Iterator[Row]:
        """Yield the rows that have come."""
        try:
            while data := os.read(self.lines, 1 << 16):
                self._rest += data
            self._closed = True
        except BlockingIOError:
            pass
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            row = Row(**json.loads(line))
            self.names.remove(row.name)
            self._began_s = time.perf_counter()
            yield row

    def ended(self) -> Row | None:
        """End the process. Returns: a row of the model that it was at, if there is one; its name is no longer left."""
        seconds = time.perf_counter() - self._began_s
        os.kill(self._pid, signal.SIGKILL)
        status = os.waitpid(self._pid, 0)[1]
        os.close(self.lines)
        if not self.names:
            return None
        name = self.names.pop(0)
        if self._closed:
            return Row(name, "crashed", f"the process ended with status {status}", seconds)
        return Row(name, "too long", f"more than {self._limit_s:.0f} s", seconds)


def _work(list_name: str, names: list[str], told: int) -> None:
    """Check names and tell what was found; never returns."""
    torch.set_num_threads(1)
    os.setpgrp()
    with one_cpsat():
        for name in names:
            row = _checked(list_name, name)
            os.write(told, json.dumps(asdict(row)).encode() + b"\n")
    os._exit(0)


def _checked(list_name: str, name: str) -> Row:
    start_s = time.perf_counter()
    found: list[tuple[str, str]] = []
    try:
        for subject in LISTS[list_name].subjects(name):
            verdict = check(subject)
            where = f"{verdict.budget} budget: " if verdict.budget and verdict.outcome is not Outcome.REFUSED else ""
            found.append((verdict.outcome.name.lower(), where + verdict.words if verdict.words else ""))
    except OffmateError as error:
        found.append(("not built", str(error)))
    except Exception as error:
        found.append(("not built", f"{type(error).__name__}: {error}"))
    if not found:
        found.append(("not built", "the list has no example of it"))
    # A name with several inputs is as good as its worst one; those that say nothing count only if there is no other.
    outcome, words = min(found, key=lambda row: ORDER.index(row[0]))
    if len(found) > 1 and outcome != "equal":
        words = f"{sum(row[0] == outcome for row in found)} of {len(found)} inputs: {words}"
    words = without_folders(words)[:_MOST_LETTERS]
    return Row(name, outcome, words, round(time.perf_counter() - start_s, 1))


def without_folders(words: str) -> str:
    """Return words without the folders of the machine that they come from, which concern nobody."""
    return _FOLDERS.sub("", words)
