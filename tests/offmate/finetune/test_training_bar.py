"""What a terminal shows of a run: what comes first where there is little width, and what stays in the scroll-back."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from offmate.finetune.report import ConsoleReporter, StepRow, format_steps
from offmate.finetune.training_bar import TrainingBar, fitting
from offmate.progress import planning_progress

GIB = 1 << 30
ROW = StepRow(51, 7.6457, 1.89e-4, 1.234, 113.0, 34.0, 17 * GIB, 31 * GIB)
FIGURES = [
    "loss 7.6457", "34 s left", "113 tokens/s", "GPU 17 GiB", "CPU 31 GiB", "lr 0.000189", "norm 1.2"
]  # fmt: skip


def line_at(width, n_steps=88):
    """The line of a run in a terminal of this width."""
    bar = TrainingBar(0, n_steps)
    bar.update(51, FIGURES)
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(bar)
    (text,) = console.export_text().splitlines()
    assert len(text) <= width
    return text


def test_the_bar_step_loss_and_time_left_stay_at_80_columns():
    text = line_at(80)
    assert all(part in text for part in ("━", "step 51/88", "loss 7.6457", "34 s left"))
    long = line_at(80, n_steps=123_456)
    assert all(part in long for part in ("━", "51/123,456", "loss 7.6457", "34 s left"))


def test_step_and_loss_stay_at_40_columns():
    assert all(part in line_at(40) for part in ("step 51/88", "loss 7.6457"))
    assert all(part in line_at(40, n_steps=123_456) for part in ("51/123,456", "loss 7.6457"))


def test_everything_fits_at_120_columns():
    assert all(part in line_at(120) for part in ("━", "step 51/88", *FIGURES))
    assert all(part in line_at(120, n_steps=12_345) for part in ("━", "51/12,345", *FIGURES))


@pytest.mark.parametrize("width", range(10, 130, 7))
def test_what_is_left_out_is_the_least_important(width):
    kept = fitting(FIGURES, width)
    assert kept == FIGURES[: len(kept)] and kept


def recorded(is_terminal, width=80):
    return Console(width=width, record=True, force_terminal=is_terminal, file=io.StringIO(), highlight=False)


def test_the_training_loss_is_in_the_scroll_back_of_a_short_run():
    console = recorded(is_terminal=True)
    reporter = ConsoleReporter(console)
    reporter.start(0, 20)
    for step in range(1, 21):
        reporter.step(replace(ROW, step=step))
    reporter.close()
    lines = re.findall(r"step (\d+)/20: (loss .*)", console.export_text())
    assert [int(step) for step, _ in lines] == [1, *range(2, 21, 2)]
    assert all("s left" in words and len(words) < 70 for _, words in lines)


def test_a_file_gets_every_figure_on_one_line():
    console = recorded(is_terminal=False, width=60)
    reporter = ConsoleReporter(console)
    reporter.start(0, 88)
    reporter.step(ROW)
    reporter.evaluation(51, 7.1)
    reporter.checkpoint(51, Path("a") / ("long" * 30))
    reporter.close()
    step, held_out, saved = console.export_text().splitlines()
    assert step.startswith("step 51/88: loss 7.6457, 34 s left, 113 tokens/s, GPU 17 GiB, CPU 31 GiB, ")
    assert ", until " in step
    assert held_out == "step 51/88: held-out loss 7.1000, loss of this step 7.6457"
    assert saved.endswith("long")


def test_plans_of_a_run_are_named_in_its_line():
    console = recorded(is_terminal=True)
    bar = TrainingBar(3, 9)
    with bar.shown(console), planning_progress() as say:
        say("solving and rounding", 0.0)
        own = recorded(is_terminal=False)
        own.print(bar)
    assert "step 3/9  planning: solving and rounding" in own.export_text()


def test_steps_are_counted_in_words():
    assert format_steps(1, "warm-up step") == "1 warm-up step"
    assert format_steps(1200) == "1,200 steps"
