"""The moving line: its phases, its width, and that nothing of it reaches a file."""

import ast
import contextlib
import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from offmate import progress
from offmate.cli import main
from offmate.moving_line import MovingLine
from offmate.progress import PHASES, Phases, hidden, planning_progress, planning_way, quiet, shown_by, working

HOUSE = Path(progress.__file__).parent
PLANNING = ("capture", "lowering", "planning", "profile")


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Terminal(io.StringIO):
    """What stderr is to a program that a person looks at."""

    def isatty(self):
        return True


@contextlib.contextmanager
def terminal():
    """Have a terminal on stderr; pytest's own takes the place of one that a fixture puts there."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(Terminal()) as stream:
        patch.setenv("TERM", "xterm")
        yield stream


def said_in(folder):
    """The phases that the modules of a folder name in `say(...)`."""
    for path in (HOUSE / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "say":
                yield node.args[0]


def test_every_phase_of_planning_has_a_share():
    words = {one.value for folder in PLANNING for one in said_in(folder) if isinstance(one, ast.Constant)}
    assert words >= {"capturing the model", "tracing blocks", "finding options", "solving and rounding"}
    assert words <= PHASES.keys()
    assert [sum(shares) for shares in zip(*PHASES.values())] == [100, 100]


def test_the_bar_goes_on_and_never_back():
    clock = Clock()
    phases = Phases(clock)
    shown = [phases.done()]
    for phase in PHASES:
        phases.say(phase, 0.0)
        for _ in range(5):
            clock.now_s += 0.7
            shown.append(phases.done())
    assert shown == sorted(shown) and len(set(shown)) > 40
    assert shown[0] == 0 and 0.9 < shown[-1] <= 1


def test_a_phase_that_is_left_out_leaves_no_gap():
    clock = Clock()
    phases = Phases(clock)
    phases.say("capturing the model", 0.0)
    clock.now_s = 1.0
    phases.say("improving the schedule", 0.0)
    before = PHASES["capturing the model"][0] / 100
    assert phases.done() == pytest.approx(before)
    phases.say("improving the schedule", 1.0)
    shares = PHASES["improving the schedule"][0], sum(share for share, _ in list(PHASES.values())[7:])
    assert phases.done() == pytest.approx(before + (1 - before) * shares[0] / shares[1])


def test_what_is_measured_here_gets_most_of_the_bar():
    phases = Phases(Clock())
    phases.say("measuring operators", 1.0)
    assert phases.done() > 0.5


def test_another_plan_begins_anew_and_other_work_fills_the_bar():
    phases = Phases(Clock())
    phases.say("improving the schedule", 1.0)
    phases.say("capturing the model", 0.0)
    assert phases.done() == 0
    measuring = Phases(Clock())
    measuring.say("matrix products", 0.7)
    assert measuring.done() == 0.7


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_line_keeps_its_phase_and_its_time_at_every_width(width):
    task = progress.Task("planning", Phases())
    task.say("further searches", 0.5)
    task.started_s = time.monotonic() - 4000
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(MovingLine(lambda: task))
    (text,) = console.export_text().splitlines()
    assert len(text) <= width and "1:06:40" in text and "planning: further" in text
    assert ("━" in text) is (width >= 80)


def test_a_terminal_sees_the_phase_and_then_nothing():
    with terminal() as screen, planning_progress() as say:
        say("solving and rounding", 0.5)
        progress._line._live.refresh()
    assert "planning: solving and rounding" in screen.getvalue()
    assert progress._line.tasks == [] and progress._line._live is None


def test_what_is_printed_comes_between():
    with terminal() as screen, working("outer"):
        with working("inner"), hidden():
            assert progress._line._live is None
        assert progress._line._live is not None
    assert "outer" in screen.getvalue() and progress._line._live is None


def test_phases_go_to_whoever_shows_them():
    seen = []
    receiver = shown_by(lambda phase, share: seen.append((phase, share)))
    with terminal() as screen, receiver, working("unseen"), planning_progress() as say:
        say("capturing the model", 0.25)
    assert seen == [("capturing the model", 0.25)] and screen.getvalue() == ""


def test_quiet_shows_nothing():
    with terminal() as screen, quiet(True), working("unseen"), planning_progress() as say:
        say("solving and rounding", 0.5)
    assert screen.getvalue() == ""


def test_the_line_moves_before_anything_is_loaded(monkeypatch):
    with terminal() as screen:
        monkeypatch.setattr("offmate.cli.cards.run", lambda arguments: 0 if "working" in screen.getvalue() else 1)
        assert main(["cards"]) == 0


def test_files_hold_no_control_characters(capsys):
    assert main(["cards"]) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out and captured.err == ""


def test_the_line_names_which_of_several_ways_is_planned():
    """Its bar and its time begin anew with each."""
    with terminal(), planning_way("micro-batches block by block"), planning_progress():
        assert progress._line.tasks[-1].words == "planning micro-batches block by block"
    with terminal(), planning_progress():
        assert progress._line.tasks[-1].words == "planning"


def test_a_file_gets_a_line_per_minute(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.02)
    with contextlib.redirect_stderr(io.StringIO()) as stream, planning_progress("planning the order") as say:
        say("finding options", 0.5)
        while stream.getvalue().count("\n") < 2:
            time.sleep(0.01)
    said = stream.getvalue()
    assert said.startswith("offmate: planning the order") and "finding options, 0 min, about" in said
    with contextlib.redirect_stderr(io.StringIO()) as stream, quiet(True), planning_progress() as say:
        say("finding options", 0.5)
        time.sleep(0.1)
    assert not stream.getvalue()
