"""The memory curve of the HTML picture: its areas, its axis and legend, and what pointing at it shows."""

from __future__ import annotations

from collections.abc import Iterator

from ..sizes import format_bytes
from .colours import KIND_COLOURS
from .items import KINDS, describe_action
from .timeline import Sample, Timeline
from .units import byte_ticks, format_seconds

_X = 8000  # the curve's resolution: of the moments in one column, the highest is shown
_Y = 1000
_ROOM = 1.06  # height of the axis, in curve heights
_FAR = 1.8  # a budget above this many peaks is named instead of drawn: it would flatten the curve


def percent(part: float, whole: float) -> str:
    """Return a part as a percentage, as CSS writes it."""
    return f"{100 * part / whole:.3f}".rstrip("0").rstrip(".") if whole > 0 else "0"


def top_of(timeline: Timeline) -> int:
    """Return the bytes at the top of the axis."""
    peak = max(timeline.peak.total_bytes, 1)
    return int(_ROOM * (timeline.budget_bytes if peak < timeline.budget_bytes <= _FAR * peak else peak))


def byte_axis(top_bytes: int) -> str:
    """Draw the marks of the axis."""
    marks = byte_ticks(top_bytes)
    return "".join(f'<span style="bottom:{percent(b, top_bytes)}%">{format_bytes(b)}</span>' for b in marks)


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


def curve(timeline: Timeline, end_s: float, top_bytes: int) -> str:
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
    at = percent(timeline.budget_bytes, top_bytes)
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


def kind_legend(timeline: Timeline) -> str:
    """Name the colours, with the bytes of each kind at the peak."""
    at_peak = dict(zip(KINDS, timeline.peak.bytes))
    keys = "".join(
        f'<span><i class="om-key" style="background:{KIND_COLOURS[kind]}"></i> {kind} '
        f"<small>{format_bytes(at_peak[kind])}</small></span>"
        for kind in reversed(timeline.kinds())
    )
    when = f"the peak, at {format_seconds(timeline.peak.start_s)}"
    return f'<p class="om-legend">{keys}<span class="om-note">sizes: at {when}</span></p>'


def hover_data(timeline: Timeline, end_s: float) -> dict[str, object]:
    """Collect what the script shows over the memory curve: every moment's column, action and bytes per kind."""
    kinds = timeline.kinds()
    places = [KINDS.index(kind) for kind in kinds]
    moments = [
        [start, describe_action(sample.action), *(sample.bytes[place] for place in places)]
        for start, _, sample in _columns(timeline, end_s)
    ]
    return {"kinds": kinds, "columns": _X, "end_s": end_s, "moments": moments}
