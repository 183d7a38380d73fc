"""What stderr shows while offmate works: the phase of planning and the time, as a moving line or a line per minute."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import exp
from typing import Any

from .libraries import library_errors

Progress = Callable[[str, float], None]
"""A callback that takes the phase of planning and the fraction of it that is done, from 0 to 1."""

# The phases of planning in their order, and the percentage of the time that each took: for another machine, on average
# of a model of 7 billion parameters and of one that fits easily; and for this machine, where operators are measured.
PHASES = {
    "capturing the model": (18, 11),
    "tracing blocks": (8, 13),
    "measuring operators": (0, 45),
    "measuring links and updates": (0, 10),
    "finding options": (6, 10),
    "finding the least budget": (5, 3),
    "solving and rounding": (8, 3),
    "improving the schedule": (25, 4),
    "second search": (15, 0),
    "third search": (7, 0),
    "fourth search": (4, 0),
    "further searches": (3, 0),
    "compiling blocks": (1, 1),
}
FURTHER_SEARCHES = ("second search", "third search", "fourth search", "further searches")
_MEASURED = "measuring operators"
_FIRST_PHASE_S = 5.0  # as long as nothing else is known
_LINE_EVERY_S = 60.0  # where stderr is a file

_receivers: list[Progress] = []
_ways: list[str] = []  # of what is planned several times, the one that is planned now


@contextlib.contextmanager
def shown_by(receiver: Progress) -> Iterator[None]:
    """Show no line inside the `with` block; phases of planning go to `receiver` instead."""
    _receivers.append(receiver)
    try:
        with hidden():
            yield
    finally:
        _receivers.remove(receiver)


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Show no line inside the `with` block, if wanted."""
    with shown_by(lambda phase, share: None) if wanted else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def working(words: str) -> Iterator[None]:
    """Show a line while something else than planning takes its time; in a file it appears after a minute."""
    with _shown(Task(words)):
        yield


@contextlib.contextmanager
def planning_way(words: str) -> Iterator[None]:
    """Name in the line which of several ways is planned inside the `with` block, since time and bar begin anew."""
    _ways.append(words)
    try:
        yield
    finally:
        _ways.remove(words)


@contextlib.contextmanager
def planning_progress(what: str = "planning") -> Iterator[Progress]:
    """Show a progress bar of planning, or of `what`, on stderr, or a line per minute in a file; none inside `quiet`."""
    if _receivers:
        yield _receivers[-1]
        return
    task = Task(f"{what} {_ways[-1]}" if _ways else what, Phases())
    with _shown(task):
        yield task.say


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Take the line away inside the `with` block, so that something else can be printed."""
    _line.hide()
    _line.hidden += 1
    try:
        yield
    finally:
        _line.hidden -= 1
        _line.show()


class Phases:
    """The fraction of a plan that is done, from its phases and the time that they usually take.

    A phase that does not take place leaves no gap: what is left of the bar belongs to the phases that may still come.
    Within a phase that says nothing, the bar goes on ever more slowly. State: the phase, its fraction, where and when
    it began, and whether operators are measured.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = self._phase_s = clock()
        self._phase, self._fraction, self._begun_at = "", 0.0, 0.0
        self._measures = False

    def say(self, phase: str, fraction: float) -> None:
        """Take note of a phase, and of the fraction of it that is done."""
        if phase != self._phase:
            self._begin(phase)
        self._fraction = fraction

    def done(self) -> float:
        """Return the fraction of the whole that is done, from 0 to 1."""
        if self._phase not in PHASES:
            return max(self._begun_at, self._fraction)
        span = self._span()
        waited = 1 - exp((self._phase_s - self._clock()) / self._usual_s(span))
        return self._begun_at + span * max(self._fraction, waited * (1 - self._fraction))

    def _begin(self, phase: str) -> None:
        order = list(PHASES)
        known = phase in PHASES and self._phase in PHASES
        again = known and order.index(phase) < order.index(self._phase)
        done = self._begun_at + self._span() if self._phase in PHASES else self.done()
        self._phase_s = self._clock()
        if again:  # the plan of another batch size
            done, self._started_s = 0.0, self._phase_s
        self._begun_at = done
        self._measures = (not again and self._measures) or phase == _MEASURED
        self._phase = phase

    def _span(self) -> float:
        """Return the part of the bar that belongs to the phase."""
        usual = [seconds[self._measures] for seconds in PHASES.values()]
        own = list(PHASES).index(self._phase)
        return (1 - self._begun_at) * usual[own] / sum(usual[own:])

    def _usual_s(self, span: float) -> float:
        """Return about the seconds of the phase, from those that the phases before it took."""
        before_s = self._phase_s - self._started_s
        return max(0.1, before_s * span / self._begun_at) if self._begun_at > 0 else _FIRST_PHASE_S


@dataclass(eq=False)
class Task:
    """What the line says: words, and the phase and fraction of planning; `phases` is None where nothing is planned."""

    words: str
    phases: Phases | None = None
    phase: str = ""
    started_s: float = field(default_factory=time.monotonic)

    def say(self, phase: str, fraction: float) -> None:
        """Take note of a phase, and of the fraction of it that is done."""
        assert self.phases is not None
        self.phase = phase
        self.phases.say(phase, fraction)

    def done(self) -> float | None:
        """Return the fraction that is done, from 0 to 1; None for what is not planning."""
        return None if self.phases is None else self.phases.done()

    def line(self) -> str:
        """Return what a line in a file says."""
        minutes, done = (time.monotonic() - self.started_s) / 60, self.done()
        percent = "" if done is None else f", about {100 * done:.0f} % done"
        return f"offmate: {self.words}{': ' if self.phase else ''}{self.phase}, {minutes:.0f} min{percent}"


class _Minutes:
    """Writes a line per minute to stderr, from a thread of its own, until it is stopped."""

    def __init__(self, task: Callable[[], Task]) -> None:
        self._task, self._ended = task, threading.Event()
        self._thread = threading.Thread(target=self._write, name="offmate progress", daemon=True)

    def start(self, refresh: bool) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _write(self) -> None:
        while not self._ended.wait(_LINE_EVERY_S):
            print(self._task().line(), file=sys.stderr, flush=True)


class _Line:
    """The line of this process: a moving one on a terminal, one per minute in a file.

    State: what it says, the innermost task last; the display while it is shown; how many want it hidden.
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.hidden = 0
        self._live: Any = None  # of rich, which is loaded only where a line is shown

    def show(self) -> None:
        if not self.tasks or self.hidden or self._live is not None or _receivers:
            return
        self._live = self._display()
        self._live.start(refresh=True)

    def _display(self) -> Any:
        """Return what shows the line, which is started and stopped."""

        def task() -> Task:
            return self.tasks[-1]

        if not sys.stderr.isatty():
            return _Minutes(task)
        with library_errors():
            from .moving_line import live

        return live(task)

    def hide(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


_line = _Line()


@contextlib.contextmanager
def _shown(task: Task) -> Iterator[None]:
    _line.tasks.append(task)
    _line.show()
    try:
        yield
    finally:
        if len(_line.tasks) == 1:
            _line.hide()
        _line.tasks.remove(task)
