"""The numbers of micro-batches per update that a planner has tried, as a table on screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from ..plans.accumulation import chosen_words, order_name, path_name, unfit_words
from ..plans.plan import Plan
from ..reports.units import format_seconds
from ..solver.accumulation import AccumulationTrial
from .screen import NARROW

_BESIDE_BAR = 63  # screen columns beside the bar
_FULL_NAMES = 48  # below this width, in columns, orders have short names
_WITH_ALONE = 60  # below this width, in columns, there is no room for what one resource alone would allow


def accumulation_table(plan: Plan, width: int) -> Table:
    """Tabulate what was tried: seconds of an update, tokens per second, and those that one resource alone would allow.

    Parameters
    ----------
    plan: one whose planner chose the number; if its tokens are not known, micro-batches are counted. width: of the
        screen, in columns.
    """
    tokens = plan.about.tokens
    each = tokens / plan.accumulation_steps if tokens else 1.0
    unit = "tokens/s" if tokens else "micro-\nbatches\nper s"
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    alone = ("compute\nalone", "bytes\nalone") if width >= _WITH_ALONE else ()
    for heading in ("micro-\nbatches", "order", "one update", unit, *alone):
        table.add_column(heading, justify="left" if heading == "order" else "right", no_wrap=True)
    wide = width >= NARROW
    if wide:
        table.add_column("", no_wrap=True)
    shown = sorted(plan.accumulation, key=lambda one: (one.micro_batches, one.micro_batches_per_pass))
    own = plan.accumulation_steps, plan.micro_batches_per_pass
    most = max((one.rate for one in shown), default=0.0)
    for one in shown:
        chosen = (one.micro_batches, one.micro_batches_per_pass) == own
        cells = _cells(one, each, width - _BESIDE_BAR if wide else 0, most)
        cells[1] = cells[1] if width >= _FULL_NAMES else cells[1].removeprefix("by ").replace(" per ", "/")
        table.add_row(*(cells if alone else cells[:4]), style="bold" if chosen else "")
    table.caption = "\n".join(_caption(plan, shown, alone=bool(alone)))
    table.caption_justify = "left"
    return table


def _cells(one: AccumulationTrial, each: float, columns: int, most: float) -> list[str]:
    order = "either" if one.micro_batches == 1 else order_name(one)
    bar = ["█" * max(1, round(columns * one.rate / most)) if one.fits and most else ""] if columns else []
    if one.update_s is None:
        return [str(one.micro_batches), order, unfit_words(one), "-", "-", "-", *bar]
    alone = (_rate(one.micro_batches * each / seconds) if seconds else "-" for seconds in (one.compute_s, one.moved_s))
    return [str(one.micro_batches), order, format_seconds(one.update_s), _rate(each * one.rate), *alone, *bar]


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _caption(plan: Plan, shown: Sequence[AccumulationTrial], *, alone: bool) -> list[str]:
    words = chosen_words(shown, plan.accumulation_steps)
    lines = [f"{words[:1].upper()}{words[1:]}. Seconds are those of fractions of tensors."]
    busiest = dict.fromkeys(path_name(one.moved_on) for one in shown if one.fits)
    if alone:
        lines.append(f"Alone: the rate if only computes, or only the bytes on {' or '.join(busiest)}, took time.")
    if len({one.order for one in shown if one.micro_batches > 1}) == 1:
        lines.append("Only one order was tried: the one that was named, or the one that can run.")
    return lines
