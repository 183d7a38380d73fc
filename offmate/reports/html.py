"""One self-contained picture of an iteration as HTML: without network access, with scripts only to hover and zoom."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from html import escape

from ..files import write_whole
from ..sizes import format_bytes
from ..solver.resources import Resource
from .colours import KIND_COLOURS, NO_BLOCK_COLOUR, block_colour, text_on
from .items import KINDS, describe_action, describe_item
from .style import SCRIPT, STYLE
from .timeline import THIN, Bar, Sample, Timeline, Wait
from .units import byte_ticks, format_seconds, second_ticks, ticks

_X = 8000  # the memory curve's resolution: of the moments in one column, the highest is shown
_Y = 1000
_BAR_X = 100_000  # the rows' resolution
_LABEL_PARTS = 640  # a bar narrower than 1 / this of the iteration never shows its name, at any zoom
_FINE = 80  # marks of the time axis when it is zoomed
_ROOM = 1.06  # height of the axis, in curve heights
_FAR = 1.8  # a budget above this many peaks is named instead of drawn: it would flatten the curve


def save_document(
    timelines: Sequence[Timeline], title: str, lines: Sequence[str], path: str | os.PathLike[str]
) -> None:
    """Write the page that `document` makes, completely or not at all."""
    write_whole(path, document(timelines, title, lines))


def document(timelines: Sequence[Timeline], title: str, lines: Sequence[str] = ()) -> str:
    """Make a whole HTML page with the picture.

    Parameters
    ----------
    timelines, lines: as for `figure`. title: the page's title.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>body{{margin:0}}.om{{min-height:100vh;padding:24px}}</style>\n"
        f"</head>\n<body>\n{figure(timelines, title, lines)}\n</body>\n</html>\n"
    )


def figure(timelines: Sequence[Timeline], title: str, lines: Sequence[str] = ()) -> str:
    """Make the picture for a page or a notebook.

    Parameters
    ----------
    timelines: one, or predicted and measured, drawn below each other on one axis.
    lines: plain text above the picture.

    Returns: one element with its own style, colours for light and dark, and a script for hovering and zooming.
    """
    end_s = max((timeline.step_s for timeline in timelines), default=0.0)
    parts = [_timeline(timeline, end_s, named=len(timelines) > 1) for timeline in timelines]
    words = "".join(f"<p>{escape(line)}</p>" for line in lines)
    zoom = "".join(f'<button type="button" data-zoom="{z}">×{z}</button>' for z in (1, 2, 4, 8, 16))
    return (
        f'<figure class="om" aria-label="{escape(title)}"><style>{STYLE}{_block_style(timelines)}</style>'
        f'<figcaption><div class="om-top"><h2>{escape(title)}</h2><span class="om-zoom">zoom {zoom}</span></div>'
        f'{words}</figcaption>{"".join(parts)}<div class="om-tip" hidden></div>'
        f"<script>{SCRIPT}</script></figure>"
    )


def _block_style(timelines: Sequence[Timeline]) -> str:
    """Make one CSS class per block, because there are many bars but few colours."""
    n_blocks = max((timeline.n_blocks for timeline in timelines), default=0)
    rules = [f".om-{block}{{fill:{block_colour(block, n_blocks)}}}" for block in range(n_blocks)]
    return "".join([*rules, f".om-n{{fill:{NO_BLOCK_COLOUR}}}"])


def _timeline(timeline: Timeline, end_s: float, named: bool) -> str:
    heading = f"<h3>{escape(timeline.name)}</h3>" if named else ""
    sides = "".join(_side(timeline, row) for row in timeline.rows)
    rows = "".join(_row(timeline, row, end_s) for row in timeline.rows)
    top_bytes = _top(timeline)
    samples = json.dumps(_hover_data(timeline, end_s), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"{heading}{_headline(timeline)}{_block_legend(timeline)}"
        f'<div class="om-grid"><div class="om-side"><div class="om-phases"></div>{sides}'
        f'<div class="om-axis"></div><div class="om-mem">{_byte_axis(top_bytes)}</div></div>'
        f'<div class="om-scroll"><div class="om-wide">{_grid(end_s)}{_phases(timeline, end_s)}{rows}'
        f'{_time_axis(end_s)}<div class="om-mem" data-top="{top_bytes}">{_curve(timeline, end_s, top_bytes)}'
        f'<div class="om-hair" hidden></div></div></div></div></div>{_kind_legend(timeline)}'
        f'<script type="application/json" class="om-data">{samples}</script>'
    )


def _headline(timeline: Timeline) -> str:
    part = timeline.stall_s / timeline.step_s if timeline.step_s > 0 else 0.0
    budget = format_bytes(timeline.budget_bytes)
    return (
        f'<p class="om-head"><b>{format_seconds(timeline.step_s)}</b> per step · '
        f"<b>{format_seconds(timeline.stall_s)}</b> of it waiting ({part:.1%}) · peak "
        f"<b>{format_bytes(timeline.peak.total_bytes)}</b> of {budget}</p>"
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
    busy = f"{timeline.busy(row):.0%} busy"
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
    return f"left:{_percent(start_s, whole_s)}%;width:{_percent(end_s - start_s, whole_s)}%"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3f}".rstrip("0").rstrip(".") if whole > 0 else "0"


def _grid(end_s: float) -> str:
    return "".join(f'<i class="om-line" style="left:{_percent(t, end_s)}%"></i>' for t in ticks(end_s))


def _time_axis(end_s: float) -> str:
    """Draw the marks, and the finer ones that have room once the picture is zoomed."""
    coarse = {text for _, text in second_ticks(end_s)}
    marks = [
        f'<span{"" if text in coarse else " class=om-fine"} style="left:{_percent(t, end_s)}%">{text}</span>'
        for t, text in second_ticks(end_s, _FINE)
    ]
    return f'<div class="om-axis">{"".join(marks)}</div>'


def _phases(timeline: Timeline, end_s: float) -> str:
    spans = [
        f'<span style="{_place(a, b, end_s)}" title="{name}: {_when(a, b)}"><b>{name}</b></span>'
        for name, a, b in timeline.phases
        if b > a
    ]
    return f'<div class="om-phases">{"".join(spans)}</div>'


def _top(timeline: Timeline) -> int:
    peak = max(timeline.peak.total_bytes, 1)
    return int(_ROOM * (timeline.budget_bytes if peak < timeline.budget_bytes <= _FAR * peak else peak))


def _byte_axis(top_bytes: int) -> str:
    marks = byte_ticks(top_bytes)
    return "".join(f'<span style="bottom:{_percent(b, top_bytes)}%">{format_bytes(b)}</span>' for b in marks)


def _columns(timeline: Timeline, end_s: float) -> Iterator[tuple[int, int, Sample]]:
    """Yield the curve at its resolution: first and last column, and the highest sample that starts in the first."""
    best: Sample | None = None
    last: Sample | None = None
    column = 0
    for sample in timeline.memory:
        x = round(sample.start_s / end_s * _X) if end_s > 0 else 0
        if best is not None and last is not None and x != column:
            yield column, column, best
            yield column, x, last
            best = None
        column = x
        last = sample
        if best is None or sample.total_bytes > best.total_bytes:
            best = sample
    if best is not None and last is not None:
        yield column, column, best
        yield column, round(last.end_s / end_s * _X) if end_s > 0 else _X, last


def _curve(timeline: Timeline, end_s: float, top_bytes: int) -> str:
    """Draw the stacked areas, each from its lower to its upper edge, and the budget."""
    columns = list(_columns(timeline, end_s))
    lower = [0] * len(columns)
    areas = []
    for kind in timeline.kinds():
        upper = [low + sample.bytes[KINDS.index(kind)] for low, (_, _, sample) in zip(lower, columns)]
        path = f"M{_edge(columns, upper, top_bytes)}L{_edge(columns, lower, top_bytes, back=True)}Z"
        areas.append(f'<path fill="{KIND_COLOURS[kind]}" d="{path}"/>')
        lower = upper
    svg = f'<svg viewBox="0 0 {_X} {_Y}" preserveAspectRatio="none" aria-hidden="true">{"".join(areas)}</svg>'
    if timeline.budget_bytes > top_bytes:
        return svg
    at = _percent(timeline.budget_bytes, top_bytes)
    return f'{svg}<div class="om-budget" style="bottom:{at}%"><span>budget</span></div>'


def _edge(columns: list[tuple[int, int, Sample]], levels: list[int], top_bytes: int, back: bool = False) -> str:
    points: list[tuple[int, int]] = []
    for (start, end, _), level in zip(columns, levels):
        y = round(_Y * (1 - level / top_bytes))
        for point in ((start, y), (end, y)):
            if len(points) > 1 and points[-1][1] == y == points[-2][1]:
                points[-1] = point
            elif not points or points[-1] != point:
                points.append(point)
    return " ".join(f"{x} {y}" for x, y in (reversed(points) if back else points))


def _kind_legend(timeline: Timeline) -> str:
    at_peak = dict(zip(KINDS, timeline.peak.bytes))
    keys = "".join(
        f'<span><i class="om-key" style="background:{KIND_COLOURS[kind]}"></i> {kind} '
        f"<small>{format_bytes(at_peak[kind])}</small></span>"
        for kind in reversed(timeline.kinds())
    )
    when = f"the peak, at {format_seconds(timeline.peak.start_s)}"
    return f'<p class="om-legend">{keys}<span class="om-note">sizes: at {when}</span></p>'


def _hover_data(timeline: Timeline, end_s: float) -> dict[str, object]:
    """Collect what the script shows over the memory curve: every moment's column, action and bytes per kind."""
    kinds = timeline.kinds()
    places = [KINDS.index(kind) for kind in kinds]
    moments = [
        [start, describe_action(sample.action), *(sample.bytes[place] for place in places)]
        for start, _, sample in _columns(timeline, end_s)
    ]
    return {"kinds": kinds, "columns": _X, "end_s": end_s, "moments": moments}
