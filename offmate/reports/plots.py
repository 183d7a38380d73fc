"""Plots with matplotlib: on a page of any colour, or in the user's own style (rcParams)."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ArgumentTypeError, ArgumentValueError
from ..sizes import format_bytes
from ..solver.accumulation import ORDERS, AccumulationTrial
from ..solver.schedule import Schedule
from .colours import KIND_COLOURS, STALL_COLOUR, block_colour
from .extra import viz
from .items import KINDS, parts_of
from .places import Place, Track, step_order, tracks
from .timeline import MORE, THIN, Timeline
from .units import byte_ticks, format_seconds, second_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TENSOR_KINDS = ("parameters", "optimizer states", "activations")
_LEAST_PART = 0.12
_CHARACTER_IN = 0.075  # inches of a character of a small line
_DPI = 120  # where the user has not chosen another than matplotlib's
_INK = "#787d85"  # as far from white as from the paper of dark notebooks
_ANY_PAGE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}
_PLAIN = {"figure.facecolor": "white", "axes.facecolor": "white", "text.color": "black"}  # matplotlib's own style
_FAR = 1.8  # a budget above this many peaks is not drawn: it would flatten the curve


class Point(Protocol):
    """A budget with its step time: a plan, or a point of `offmate.sweep`. Times are None if no plan fits."""

    @property
    def budget_bytes(self) -> int: ...

    @property
    def least_budget_bytes(self) -> int: ...

    @property
    def predicted_step_s(self) -> float | None: ...

    @property
    def lower_bound_s(self) -> float | None: ...


def draw_timeline(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """Draw the work of compute, links and CPU over time, coloured by block, and where the executor waits.

    Parameters
    ----------
    timeline: predicted or measured. ax: axes to draw on; new ones if None.

    Returns: the axes.

    Raises: ImportError if matplotlib is not installed.
    """
    with _canvas(ax, 10, 2.8) as ax:
        for place, row in enumerate(timeline.rows):
            for thin in (False, True):
                bars = [b for b in timeline.wrapped() if b.row == row and (b.word in THIN) is thin]
                spans = [(bar.start_s, bar.end_s - bar.start_s) for bar in bars]
                colours = [block_colour(bar.block, timeline.n_blocks) for bar in bars]
                height = 0.4 if thin else 0.8
                ax.broken_barh(spans, (place - height / 2, height), facecolors=colours, linewidth=0)
        waits = [(wait.start_s, wait.end_s - wait.start_s) for wait in timeline.waits]
        ax.broken_barh(waits, (-0.4, 0.8), facecolors="none", edgecolor=STALL_COLOUR, hatch="/////", linewidth=0)
        titles = [f"{name}\n{round(100 * timeline.busy(row))} % busy" for row, name in timeline.rows.items()]
        ax.set_yticks(range(len(titles)), titles)
        ax.set_ylim(len(titles) - 0.5, -0.5)
        _phase_lines(ax, timeline)
        _time_axis(ax, timeline)
        _frameless(ax)
        stalled = f"{format_seconds(timeline.stall_s)} of it waiting (hatched)" if waits else "nothing waits"
        ax.set_title(f"One step: {format_seconds(timeline.step_s)}, {stalled}; colours: blocks", loc="left", pad=18)
    return ax


def draw_memory(timeline: Timeline, ax: Axes | None = None, beside: Timeline | None = None) -> Axes:
    """Draw the bytes on the device over one iteration, stacked by kind, and the budget.

    Parameters
    ----------
    beside: another timeline, whose total is drawn as a line over the areas. The others: as for `draw_timeline`.
    """
    with _canvas(ax, 10, 3.6) as ax:
        # Two points per sample draw the steps, and preserve the spikes of samples that take no time.
        points, kinds = list(_levels(timeline)), timeline.kinds()
        times = [seconds for seconds, _ in points]
        levels = [[0 if held is None else held[KINDS.index(kind)] for _, held in points] for kind in kinds]
        ax.stackplot(times, levels, labels=kinds, colors=[KIND_COLOURS[kind] for kind in kinds], linewidth=0)
        if beside is not None:
            line = [(s, sample.total_bytes) for sample in beside.memory for s in (sample.start_s, sample.end_s)]
            ax.plot(*zip(*line), linewidth=1, color="0.5", label=beside.name)
        peak = timeline.peak.total_bytes
        drawn = timeline.budget_bytes <= _FAR * peak
        if drawn:
            ax.axhline(timeline.budget_bytes, linestyle="--", linewidth=1, color="0.5")
        top = max(peak, timeline.budget_bytes if drawn else 0) * 1.06
        ax.set_ylim(0, top)
        ax.set_yticks(byte_ticks(top), [format_bytes(tick) for tick in byte_ticks(top)])
        _phase_lines(ax, timeline)
        _time_axis(ax, timeline)
        _frameless(ax)
        budget = f"budget {format_bytes(timeline.budget_bytes)}{' (dashed)' if drawn else ''}"
        name = f", {timeline.name}" if beside is not None else ""
        ax.set_title(f"On the device{name}: peak {format_bytes(peak)}, {budget}", loc="left", pad=18)
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, reverse=True)
    return ax


def draw_tensors(schedule: Schedule, ax: Axes | None = None) -> Axes:
    """Draw where parameters, optimizer states and activations are at each step; `ax` as for `draw_timeline`.

    Within a kind, the height of a row is the tensor's size, so the coloured area is bytes times steps on the device.
    """
    with _canvas(ax, 10, 6) as ax:
        order = {kind: number for number, kind in enumerate(_TENSOR_KINDS)}
        shown = sorted((t for t in tracks(schedule) if t.kind in order), key=lambda track: order[track.kind])
        edges, borders = _rows(shown)
        colours = [_place_colours(track.kind, track.places) for track in shown]
        steps = step_order(schedule)
        ax.pcolormesh(range(len(steps) + 1), edges, colours, edgecolors="none")
        ax.set_ylim(max(edges[-1], 1e-9), 0)
        middles = [sum(span) / 2 for span in borders.values()]
        ax.set_yticks(middles, [_kind_label(kind, shown) for kind in borders])
        for start, _ in list(borders.values())[1:]:
            ax.axhline(start, color="0.5", linewidth=1)
        _step_axis(ax, steps, schedule)
        _frameless(ax)
        _place_legend(ax)
        ax.set_title("Where tensors are at each step (height: bytes)", loc="left", pad=18)
    return ax


def plot_sweep(plans: Iterable[Point] | Mapping[str, Iterable[Point]], ax: Axes | None = None) -> Axes:
    """Plot budget against step time: one curve per name, with its lower bound and the least budget that works.

    Parameters
    ----------
    plans: plans of one model for several budgets, or points of `offmate.sweep`; or a mapping from names, such as those
        of GPUs, to them. Points that do not fit are left out.
    ax: axes to draw on; new ones if None.

    Returns: the axes.

    Raises: ValueError if no plan fits; ImportError if matplotlib is not installed.
    """
    if not isinstance(plans, Iterable):
        raise ArgumentTypeError(
            f"plot_sweep is given a {type(plans).__name__}; it takes a list of plans or points, or a dict of such lists"
        )
    curves = plans if isinstance(plans, Mapping) else {"": plans}
    sorted_plans = {name: _that_fit(some) for name, some in curves.items()}
    if not any(sorted_plans.values()):
        raise ArgumentValueError("plot_sweep needs at least one plan that fits")
    with _canvas(ax, 7, 4) as ax:
        for name, curve in sorted_plans.items():
            budgets = [plan.budget_bytes for plan in curve]
            (line,) = ax.plot(budgets, [plan.predicted_step_s for plan in curve], marker="o", label=name or "plan")
            bounds = [plan.lower_bound_s for plan in curve]
            ax.plot(budgets, bounds, ":", color=line.get_color(), label=f"{name} bound".strip())
            for least in sorted({plan.least_budget_bytes for plan in curve}):
                ax.axvline(least, color=line.get_color(), linewidth=1, alpha=0.5)
        every = [plan for curve in sorted_plans.values() for plan in curve]
        top_bytes, top_s = max(p.budget_bytes for p in every) * 1.05, max(p.predicted_step_s for p in every) * 1.08
        marks = second_ticks(top_s, 6)
        ax.set_xlim(0, top_bytes)
        ax.set_ylim(0, top_s)
        ax.set_xticks(byte_ticks(top_bytes), [format_bytes(tick) for tick in byte_ticks(top_bytes)])
        ax.set_yticks([tick for tick, _ in marks], [text for _, text in marks])
        ax.set_xlabel("GPU memory budget; thin line: the least that works")
        ax.set_ylabel("one step")
        ax.set_title("What a budget costs", loc="left")
        ax.grid(alpha=0.25)
        ax.legend(frameon=False)
        _frameless(ax)
    return ax


def draw_accumulation(
    trials: Sequence[AccumulationTrial], chosen: int, tokens: int = 0, ax: Axes | None = None
) -> Axes:
    """Draw micro-batches per update against what they train per second, below what one resource alone would allow.

    Parameters
    ----------
    trials: what was tried. chosen: the number of micro-batches that was chosen.
    tokens: of a micro-batch; 0 counts micro-batches. ax: axes to draw on; new ones if None.

    Returns: the axes. Raises: ArgumentValueError if nothing was tried that fits; ImportError if matplotlib is not
        installed.
    Source: GreedySnake, figure 3 (the roofline).
    """
    fitting = sorted((one for one in trials if one.fits), key=lambda one: one.micro_batches)
    if not fitting:
        raise ArgumentValueError('there is nothing to draw: plan with accumulation_steps="auto" and a budget that fits')
    each = tokens or 1
    with _canvas(ax, 10, 3.6) as ax:
        for order in ORDERS:
            # One micro-batch is of both orders.
            of = [one for one in fitting if not one.per_pass and (one.order == order or one.micro_batches == 1)]
            if len(of) > 1 or of[0].order == order:
                ax.plot([one.micro_batches for one in of], [each * one.rate for one in of], marker="o", label=order)
        some = [one for one in fitting if one.per_pass]
        if some:
            ax.plot(
                [one.micro_batches for one in some], [each * one.rate for one in some], "s", label="by block, in passes"
            )
        without = sorted({one.micro_batches for one in trials if not one.fits})
        if without:
            ax.plot(without, [0.0] * len(without), "x", color="0.5", clip_on=False, label="does not fit in some order")
        best = {one.micro_batches: one for one in sorted(fitting, key=lambda one: one.rate)}
        bounds = [best[count] for count in sorted(best)]
        counts = [one.micro_batches for one in bounds]
        top = 1.25 * max(each * one.micro_batches / one.compute_s for one in bounds if one.compute_s > 0)
        for name, style, seconds in (
            ("computes alone", "--", [one.compute_s for one in bounds]),
            ("bytes alone", ":", [one.moved_s for one in bounds]),
        ):
            known = [(count, each * count / one_s) for count, one_s in zip(counts, seconds) if one_s > 0]
            beyond = " (above all of this)" if known and min(rate for _, rate in known) > top else ""
            ax.plot(*zip(*known), style, color="0.5", label=f"{name}{beyond}") if known else None
        ax.axvline(chosen, color="0.5", linewidth=1, alpha=0.5)
        ax.set_ylim(0, top)  # bytes alone may allow many times more
        counts = sorted({*counts, *without})
        ax.set_xscale("log", base=2)
        ax.set_xticks(counts, [str(count) for count in counts])
        ax.set_xlabel(f"micro-batches per update; thin line: {chosen}, which was chosen")
        ax.set_ylabel("tokens/s" if tokens else "micro-batches/s")
        ax.set_title("What more micro-batches per update train per second", loc="left")
        ax.grid(alpha=0.25)
        ax.legend(loc="lower right", frameon=False)
        _frameless(ax)
    return ax


def _levels(timeline: Timeline) -> Iterator[tuple[float, Sequence[int] | None]]:
    """Yield times, and the bytes of each kind then; None while passes that are not drawn run."""
    gaps = [(start_s, end_s) for name, start_s, end_s in timeline.phases if name.endswith(MORE)]
    for sample in timeline.memory:
        within = [(a, b) for a, b in gaps if sample.start_s <= a and b <= sample.end_s]
        yield sample.start_s, sample.bytes
        for start_s, end_s in within:
            yield from ((start_s, sample.bytes), (start_s, None), (end_s, None), (end_s, sample.bytes))
        yield sample.end_s, sample.bytes


def _that_fit(points: Iterable[Point]) -> list[Any]:
    fitting = [point for point in points if point.predicted_step_s is not None]
    return sorted(fitting, key=lambda point: point.budget_bytes)


@contextlib.contextmanager
def _canvas(ax: Axes | None, width: float, height: float) -> Iterator[Axes]:
    """Give the user's axes, or new ones of a size in inches; in matplotlib's plain style they suit any page."""
    if ax is not None:
        yield ax
        return
    pyplot = viz("matplotlib.pyplot")
    plain = all(pyplot.rcParams[name] == value for name, value in _PLAIN.items())
    chosen = pyplot.rcParams["figure.dpi"]
    dpi = _DPI if chosen == pyplot.rcParamsDefault["figure.dpi"] else chosen
    # A notebook's backend sets `interactive` as it loads. Loaded in the context, it would lose that, and show one plot.
    pyplot.draw_if_interactive()
    with pyplot.rc_context(_ANY_PAGE if plain else {}):
        made = pyplot.subplots(figsize=(width, height), layout="constrained", dpi=dpi)[1]
        yield made
        if plain:  # marks that are made later take their colour from here
            made.tick_params(colors=_INK)


def write_below(ax: Axes, words: str) -> None:
    """Write a small line below a plot, which says what it is of."""
    below = -44 if ax.get_xlabel() else -30
    ax.annotate(
        textwrap.fill(words, int(_width_in(ax) / _CHARACTER_IN)), (0, 0), (0, below), xycoords="axes fraction",
        textcoords="offset points", ha="left", va="top", fontsize="small", color=ax.yaxis.label.get_color(),
    )  # fmt: skip


def _width_in(ax: Axes) -> float:
    """Return the width of axes in inches, before their figure is laid out."""
    figure = ax.get_figure(root=True)
    return figure.get_figwidth() * ax.get_position().width if figure is not None else 0.0


def _frameless(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)


def _time_axis(ax: Axes, timeline: Timeline) -> None:
    marks = second_ticks(timeline.step_s)
    ax.set_xlim(0, max(timeline.step_s, 1e-9))
    ax.set_xticks([tick for tick, _ in marks], [text for _, text in marks])


def _phase_lines(ax: Axes, timeline: Timeline) -> None:
    scale_in = _width_in(ax) / max(timeline.step_s, 1e-9)
    for name, start_s, end_s in timeline.phases:
        if end_s > start_s:
            ax.axvline(start_s, color="0.5", linewidth=0.8)
        if (end_s - start_s) * scale_in > (len(name) + 1) * _CHARACTER_IN:  # shorter ones would overlap
            _above(ax, start_s, name)


def _above(ax: Axes, x: float, text: str) -> None:
    ax.annotate(
        text, (x, 1), (3, 3), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize="small",
        color="0.5",
    )  # fmt: skip


def _place_colours(kind: str, places: tuple[Place, ...]) -> list[tuple[float, float, float, float]]:
    red, green, blue = (int(KIND_COLOURS[kind][i : i + 2], 16) / 255 for i in (1, 3, 5))
    opacity = {Place.HOST: 0.06, Place.LEAVING: 0.45, Place.ARRIVING: 0.45, Place.DEVICE: 1.0}
    return [(red, green, blue, opacity[place]) for place in places]


def _rows(shown: list[Track]) -> tuple[list[float], dict[str, tuple[float, float]]]:
    """Return the borders of the rows and of the kinds; kinds of few bytes are enlarged, so that their names fit."""
    totals = {kind: sum(t.bytes for t in shown if t.kind == kind) for kind in _TENSOR_KINDS}
    least = _LEAST_PART * max(sum(totals.values()), 1)
    edges, borders = [0.0], {}
    for kind in (kind for kind, total in totals.items() if total):
        start, scale = edges[-1], max(1.0, least / totals[kind])
        for track in shown:
            if track.kind == kind:
                edges.append(edges[-1] + track.bytes * scale)
        borders[kind] = (start, edges[-1])
    return edges, borders


def _kind_label(kind: str, shown: list[Track]) -> str:
    total = sum(track.bytes for track in shown if track.kind == kind)
    return f"{kind}\n{format_bytes(total)}"


def _step_axis(ax: Axes, steps: tuple[int, ...], schedule: Schedule) -> None:
    columns = {step: column for column, step in enumerate(steps)}
    for name, actions in parts_of(schedule):
        if actions:
            ax.axvline(columns[actions[0].step], color="0.5", linewidth=0.8)
            _above(ax, columns[actions[0].step], name)
    every = max(1, len(steps) // 12)
    ax.set_xticks([c + 0.5 for c in range(0, len(steps), every)], [str(s) for s in steps[::every]])
    ax.set_xlabel("step")


def _place_legend(ax: Axes) -> None:
    patches = viz("matplotlib.patches")
    meanings = {"on the device": 1.0, "arriving or leaving": 0.45, "not there": 0.06}
    handles = [patches.Patch(color=(0.3, 0.5, 0.6, opacity), label=name) for name, opacity in meanings.items()]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
