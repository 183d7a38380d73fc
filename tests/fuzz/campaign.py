"""Many sequences in a few processes, one line per seed in a file, so that a campaign can be run in pieces."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent

_LATE_S = 120  # a worker that has not answered by then is taken for one that never will
_LASTS = 250  # sequences that a worker does before another one takes its place, since torch keeps much of each


def code() -> str:
    """A hash of what decides an outcome: offmate's sources and these."""
    found = [p for folder in ("offmate", "solver", "runtime", "tests/fuzz") for p in (ROOT / folder).rglob("*.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(found))).hexdigest()[:12]


def cache_dir() -> str:
    """Where plans of these sources are kept."""
    folder = Path(tempfile.gettempdir(), f"offmate-fuzz-{code()}")
    folder.mkdir(exist_ok=True)
    return str(folder)


# -- the file ---------------------------------------------------------------------------------------------------------


class Results:
    """The results file: a line that says which seeds, then one line per seed that is done.

    State: `start` and `count`, which seeds; `done`, lines by seed. Lines of other sources are left out.
    """

    def __init__(self, path: Path, start: int | None, count: int) -> None:
        self._path, self._code = path, code()
        self.start, self.count, self.done = start, count, {}
        for line in self._lines():
            if "start" in line:
                self.done = {} if start not in (None, line["start"]) else self.done
                self.start = line["start"] if start is None else start
            else:
                self.done[line["seed"]] = line
        if start is None and (self.start is None or not self.left):
            self.start, self.done = random.SystemRandom().randrange(10**6) * 10**4, {}
        assert self.start is not None
        self._write({"start": self.start})

    @property
    def left(self) -> list[int]:
        """Seeds that are not done yet."""
        assert self.start is not None
        return [seed for seed in range(self.start, self.start + self.count) if seed not in self.done]

    def add(self, line: dict[str, Any]) -> None:
        """A seed is done."""
        self.done[line["seed"]] = line
        self._write(line)

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Lines of the seeds that were asked for."""
        assert self.start is not None
        return [line for seed, line in sorted(self.done.items()) if 0 <= seed - self.start < self.count]

    def _lines(self) -> Iterator[dict[str, Any]]:
        for text in self._path.read_text().splitlines() if self._path.exists() else ():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # the last line of a campaign that was killed
            if line.get("code") == self._code:
                yield line

    def _write(self, line: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"code": self._code, **line}) + "\n")


# -- the processes ----------------------------------------------------------------------------------------------------


def work(pipe: Any, folder: str) -> None:
    """Answer seeds with outcomes until the pipe is closed; ("shrink", seed) with the smallest sequence as text."""
    import gc
    import logging

    import torch

    from . import sequence
    from .figures import from_hardware_file

    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    with from_hardware_file(all_passes=True):
        while (asked := pipe.recv()) is not None:
            what, seed = asked
            given = sequence.sequence(seed)
            outcome = sequence.run(given, folder)
            if what == "run":
                pipe.send({**vars(outcome), "kind_of_model": given.setup.kind, "acts": len(given.acts)})
                # What was imported stays; looking through it again and again takes a fifth of all.
                if not gc.get_freeze_count():
                    gc.freeze()
            else:
                pipe.send(sequence.text(*sequence.shrink(given, outcome, folder)))


class _Worker:
    """A process that plays sequences. State: the process, the seed it is at, since when, and how many it has done."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.seed: int | None = None
        self._done = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, self._folder), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, seed: int) -> None:
        if self._done and self._done % _LASTS == 0:
            self.end()
            self._start()
        self.seed, self.since = seed, time.monotonic()
        self._done += 1
        self.pipe.send(("run", seed))

    @property
    def late(self) -> bool:
        return self.seed is not None and time.monotonic() - self.since > _LATE_S

    def take(self) -> dict[str, Any]:
        """The outcome; a process that has died, or never answers, is a finding, and another one takes its place."""
        seed, self.seed = self.seed, None
        try:
            if not self.late:
                line: dict[str, Any] = self.pipe.recv()
                if line["kind"] == "hang":
                    raise EOFError  # what it was at may hold locks
                return line
        except EOFError:
            pass
        self._process.kill()
        self._process.join()
        words = f"hang, or the process ended ({self._process.exitcode})"
        self._start()
        spent = time.monotonic() - self.since
        return {"seed": seed, "result": "finding", "kind": words, "detail": words, "at": -1, "seconds": spent,
                "told": [], "kind_of_model": "", "acts": 0}  # fmt: skip

    def shrink(self, seed: int) -> str:
        self.pipe.send(("shrink", seed))
        return str(self.pipe.recv()) if self.pipe.poll(4 * _LATE_S) else f"# seed {seed}: could not be made smaller"

    def end(self) -> None:
        self.pipe.send(None)
        self._process.join(10)
        self._process.kill()


def run(results: Results, workers: int, limit_s: float, smaller: int, say: Callable[[str], None]) -> None:
    """Do what is left, for at most so long.

    Parameters
    ----------
    smaller: for how many kinds of findings a sequence is made as small as it can be. say: told of progress.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    end = time.monotonic() + limit_s
    queue = iter(results.left)
    crew = [_Worker(cache_dir()) for _ in range(workers)]
    for worker in crew:
        _next(worker, queue)
    while busy := [worker for worker in crew if worker.seed is not None]:
        ready = wait([worker.pipe for worker in busy], timeout=5)
        for worker in busy:
            if worker.pipe in ready or worker.late:
                line = worker.take()
                results.add(line)
                if line["result"] == "finding":
                    say(f"seed {line['seed']}: {line['kind']}")
                if time.monotonic() < end:
                    _next(worker, queue)
    for kind in [k for k, _ in _by_kind(results.asked, "finding").most_common(smaller)]:
        seed = next(x["seed"] for x in results.asked if x["result"] == "finding" and x["kind"] == kind)
        say("\n" + crew[0].shrink(seed))
    for worker in crew:
        worker.end()


def _next(worker: _Worker, queue: Iterator[int]) -> None:
    seed = next(queue, None)
    if seed is not None:
        worker.give(seed)


# -- the summary ------------------------------------------------------------------------------------------------------


def _by_kind(lines: list[dict[str, Any]], result: str) -> Counter[str]:
    return Counter(line["kind"] for line in lines if line["result"] == result)


def summary(results: Results) -> str:
    """How many sequences ended how, refusals and findings by kind with a seed each, and what it took."""
    lines = results.asked
    counts = Counter(line["result"] for line in lines)
    took_s = sum(line["seconds"] for line in lines)
    said = [
        f"{len(lines)} of {results.count} sequences from seed {results.start}, {took_s / max(1, len(lines)):.2f} s each"
    ]
    said.append(", ".join(f"{counts[r]} {r}" for r in ("equal", "refused", "both raised", "finding")))
    early = sum(line["at"] < 3 for line in lines if line["result"] == "refused")
    said.append(f"{early} were refused within the first three actions")
    for result in ("refused", "both raised", "finding"):
        for kind, count in _by_kind(lines, result).most_common():
            seed = next(x["seed"] for x in lines if x["result"] == result and x["kind"] == kind)
            said.append(f"{count:6d}  {result}  {kind}  (seed {seed})")
    return "\n".join(said)
