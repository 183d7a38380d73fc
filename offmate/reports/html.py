"""One self-contained picture of an iteration as HTML: without network access, with a script only to point and zoom."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape

from ..files import write_whole
from ..sizes import format_bytes
from ..solver.resources import Resource
from .colours import NO_BLOCK_COLOUR, block_colour, text_on
from .html_memory import byte_axis, curve, hover_data, kind_legend, percent, top_of
from .items import describe_action, describe_item
from .script import SCRIPT
from .style import STYLE
from .timeline import THIN, Bar, Timeline, Wait
from .units import format_seconds, second_ticks, ticks

_HOW = "Zoom: turn the wheel, or drag over a part. Move: Shift and drag, or the arrow keys. All: double-click, or 0."
_ZOOM = (
    f'<span class="om-zoom" title="{_HOW}">zoom '
    + "".join(f'<button type="button" data-zoom="{z}">×{z}</button>' for z in (1, 2, 4, 8, 16))
    + "</span>"
)
_BAR_X = 100_000  # the rows' resolution
_LABEL_PARTS = 640  # a bar narrower than 1 / this of the iteration never shows its name, at any zoom


def save_document(
    timelines: Sequence[Timeline], title: str, lines: Sequence[str], path: str | os.PathLike[str], about: str = ""
) -> None:
    """Write the page that `document` makes, completely or not at all."""
    write_whole(path, document(timelines, title, lines, about))


def document(
    timelines: Sequence[Timeline],
    title: str,
    lines: Sequence[str] = (),
    about: str = "",
    table: Sequence[Sequence[str]] = (),
) -> str:
    """Make a whole HTML page with the picture.

    Parameters
    ----------
    title: the page's title. The others: as for `figure`.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>body{{margin:0}}.om{{min-height:100vh;padding:24px}}</style>\n"
        f"</head>\n<body>\n{figure(timelines, title, lines, about, table)}\n</body>\n</html>\n"
    )


def figure(
    timelines: Sequence[Timeline],
    title: str,
    lines: Sequence[str] = (),
    about: str = "",
    table: Sequence[Sequence[str]] = (),
) -> str:
    """Make the picture for a page or a notebook.

    Parameters
    ----------
    timelines: one, or several, drawn below each other on the same axes. about: a line that says what the picture is of.
    lines: sentences that can be unfolded. table: rows of cells below the picture, the headings first.

    Returns: one element with its own style, colours for light and dark, and a script for pointing and zooming.
    """
    end_s = max((timeline.step_s for timeline in timelines), default=0.0)
    top_bytes = max((top_of(timeline) for timeline in timelines), default=1)
    parts = [_timeline(timeline, end_s, top_bytes, named=len(timelines) > 1) for timeline in timelines]
    below = f'<p class="om-about">{escape(about)}</p>' if about else ""
    return (
        f'<figure class="om" aria-label="{escape(title)}"><style>{STYLE}{_block_style(timelines)}</style>'
        f'<figcaption><div class="om-top"><h2>{escape(title)}</h2>{_ZOOM}</div>{below}{_folded(lines)}</figcaption>'
        f'{"".join(parts)}{_table(table)}<div class="om-tip" hidden></div><script>{SCRIPT}</script></figure>'
    )


def _folded(lines: Sequence[str]) -> str:
    """Make sentences that can be unfolded, so that they do not push the picture down."""
    words = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f"<details><summary>In words</summary>{words}</details>" if lines else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f'<div class="om-table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _block_style(timelines: Sequence[Timeline]) -> str:
    """Make one CSS class per block, because there are many bars but few colours."""
    n_blocks = max((timeline.n_blocks for timeline in timelines), default=0)
    rules = [f".om-{block}{{fill:{block_colour(block, n_blocks)}}}" for block in range(n_blocks)]
    return "".join([*rules, f".om-n{{fill:{NO_BLOCK_COLOUR}}}"])


def _timeline(timeline: Timeline, end_s: float, top_bytes: int, named: bool) -> str:
    heading = f"<h3>{escape(timeline.name)}</h3>" if named else ""
    budget = f" of {format_bytes(timeline.budget_bytes)}" if named else ""  # the title of a single one says it
    sides = "".join(_side(timeline, row) for row in timeline.rows)
    rows = "".join(_row(timeline, row, end_s) for row in timeline.rows)
    samples = json.dumps(hover_data(timeline, end_s), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"{heading}{_headline(timeline, budget)}{_block_legend(timeline)}"
        f'<div class="om-grid"><div class="om-side"><div class="om-phases"></div>{sides}'
        f'<div class="om-axis"></div><div class="om-mem">{byte_axis(top_bytes)}</div></div>'
        '<div class="om-scroll" tabindex="0" aria-label="timeline"><div class="om-wide">'
        f"{_grid(end_s)}{_phases(timeline, end_s)}{rows}"
        f'{_time_axis(end_s)}<div class="om-mem" data-top="{top_bytes}">{curve(timeline, end_s, top_bytes)}'
        f'<div class="om-hair" hidden></div></div></div></div></div>{kind_legend(timeline)}'
        f'<script type="application/json" class="om-data">{samples}</script>'
    )


def _headline(timeline: Timeline, budget: str) -> str:
    part = timeline.stall_s / timeline.step_s if timeline.step_s > 0 else 0.0
    waiting = f"waiting for <b>{format_seconds(timeline.stall_s)}</b> of it ({100 * part:.1f} %)"
    return (
        f'<p class="om-head"><b>{format_seconds(timeline.step_s)}</b> per step · '
        f"{waiting if timeline.stall_s > 0 else 'no waiting'} · peak "
        f"<b>{format_bytes(timeline.peak.total_bytes)}</b>{budget}</p>"
    )


def _block_legend(timeline: Timeline) -> str:
    stops = ",".join(block_colour(2 * i, timeline.n_blocks) for i in range((timeline.n_blocks + 1) // 2))
    ramp = f"linear-gradient(90deg,{stops})" if stops.count("#") > 1 else (stops or "none")
    last = timeline.n_blocks - 1
    return (
        f'<p class="om-legend"><span>block 0 <i class="om-ramp" style="background:{ramp}"></i> block {last}</span>'
        '<span><i class="om-key om-stall"></i> waiting</span><span><i class="om-key om-upd"></i> update on the device'
        "</span></p>"
    )


def _side(timeline: Timeline, row: Resource) -> str:
    busy = f"{round(100 * timeline.busy(row))} % busy"
    return f'<div class="om-label om-row"><span>{timeline.title(row)}</span><small>{busy}</small></div>'


def _row(timeline: Timeline, row: Resource, end_s: float) -> str:
    """Draw one row: bars in a drawing that stretches with the page, and over it the labels, which must not stretch."""
    bars = [bar for bar in timeline.wrapped() if bar.row == row and bar.end_s > bar.start_s]
    rects = "".join(_bar(bar, end_s) for bar in bars)
    svg = f'<svg viewBox="0 0 {_BAR_X} 100" preserveAspectRatio="none">{rects}</svg>'
    if row != Resource.COMPUTE:
        return f'<div class="om-row">{svg}</div>'
    labels = "".join(_label(bar, timeline.n_blocks, end_s) for bar in bars if _has_label(bar, end_s))
    waits = "".join(_wait(wait, timeline.title(wait.cause), end_s) for wait in timeline.waits)
    return f'<div class="om-row">{svg}{labels}{waits}</div>'


def _bar(bar: Bar, end_s: float) -> str:
    start, end = (round(seconds / end_s * _BAR_X) for seconds in (bar.start_s, bar.end_s))
    edge = "y='25' height='50'" if bar.word in THIN else "y='0' height='100'"
    of_block = "n" if bar.block is None else bar.block
    return (
        f'<rect class="om-{of_block}" x="{start}" width="{max(end - start, 1)}" {edge}>'
        f"<title>{escape(_bar_words(bar))}</title></rect>"
    )


def _has_label(bar: Bar, end_s: float) -> bool:
    return bar.word in ("forward", "backward") and (bar.end_s - bar.start_s) * _LABEL_PARTS > end_s


def _label(bar: Bar, n_blocks: int, end_s: float) -> str:
    ink = text_on(block_colour(bar.block, n_blocks))
    return f'<i class="om-b" style="{_place(bar.start_s, bar.end_s, end_s)};color:{ink}"><s>{escape(bar.name)}</s></i>'


def _bar_words(bar: Bar) -> str:
    what = "" if bar.row == Resource.COMPUTE and bar.word not in THIN else describe_item(bar.name)
    of = "" if bar.block is None else f"block {bar.block}"
    size = format_bytes(bar.bytes) if bar.bytes else ""
    first = f"{bar.word}: {what}" if what else f"{bar.word} of {of}" if of else bar.word
    where = ", ".join(word for word in (size, of if what else "", f"step {bar.step}") if word)
    return f"{first}\n{where}\n{_when(bar.start_s, bar.end_s)}"


def _wait(wait: Wait, cause: str, end_s: float) -> str:
    words = f"waiting for {cause}\nbefore: {describe_action(wait.action)}"
    title = escape(f"{words}\n{_when(wait.start_s, wait.end_s)}")
    return f'<i class="om-stall" style="{_place(wait.start_s, wait.end_s, end_s)}" title="{title}"></i>'


def _when(start_s: float, end_s: float) -> str:
    return f"{format_seconds(end_s - start_s)}, from {format_seconds(start_s)} to {format_seconds(end_s)}"


def _place(start_s: float, end_s: float, whole_s: float) -> str:
    return f"left:{percent(start_s, whole_s)}%;width:{percent(end_s - start_s, whole_s)}%"


def _grid(end_s: float) -> str:
    return "".join(f'<i class="om-line" style="left:{percent(t, end_s)}%"></i>' for t in ticks(end_s))


def _time_axis(end_s: float) -> str:
    """Draw the marks of the whole iteration; the script draws finer ones once the picture is zoomed."""
    marks = [f'<span style="left:{percent(t, end_s)}%">{text}</span>' for t, text in second_ticks(end_s)]
    return f'<div class="om-axis" data-end="{end_s:.9g}">{"".join(marks)}</div>'


def _phases(timeline: Timeline, end_s: float) -> str:
    spans = [
        f'<span style="{_place(a, b, end_s)}" title="{name}: {_when(a, b)}"><b>{name}</b></span>'
        for name, a, b in timeline.phases
        if b > a
    ]
    return f'<div class="om-phases">{"".join(spans)}</div>'
