"""A plan on screen: the summary first, then what happens to each class of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plans.drives import cast_words
from ..plans.plan import Plan
from ..plans.sweep import SweepPoint
from ..plans.table import class_lines, class_table, legend, plan_table
from ..reports.items import block_of_items
from ..reports.units import format_seconds, in_usual_units
from ..sizes import format_bytes, format_least_bytes
from ..solver.explain import Explanation
from ..solver.items import ItemKind
from .accumulation_table import accumulation_table
from .screen import NARROW, pairs

_WORDS = {
    "compute": "compute",
    "copy in": "copies in",
    "copy out": "copies out",
    "cpu": "CPU updates",
    "host memory": "RAM bandwidth",
    "copy in from storage": "reads from storage",
}
_BESIDE_BAR = {False: 34, True: 46}  # screen columns beside the bar, without and with the RAM's
_UNLIMITED_BYTES = 2**60  # a RAM budget beyond this was not named
_USUAL_RAM_BYTES = 32 << 30
_TIMES = 9.0  # parts above which an overhead is written as a factor
_BUSY = 0.7  # a resource that works for at least this part of a phase is named


def print_plan(
    console: Console,
    plan: Plan,
    *,
    offers: bool = False,
    every_block: bool = False,
    headline: str = "",
    drives: bool = False,
) -> None:
    """Print a plan; the first line says how much memory it needs.

    Parameters
    ----------
    headline: what is planned, if known. drives: whether drives were named.
    offers: also solve for what other changes would gain.
    every_block: print a row per set of blocks that are treated alike, instead of per class.
    """
    console.print(verdict(plan))
    if headline:
        console.print(headline, markup=False)
    rows = list(summary(plan))
    if drives and not plan.read_bytes and not any(plan.stored_bytes):
        rows.append(("storage", "not used: this plan needs no files"))
    if plan.problem is not None:
        rows += _limit_rows(plan.limits(offers))
    console.print(pairs(rows))
    console.print()
    if plan.accumulation:
        console.print(accumulation_table(plan, console.width))
        console.print()
    print_blocks(console, plan, every_block=every_block)
    console.print(f"classes, by their largest parameter: {', '.join(_classes(plan))}", style="dim", markup=False)


def print_blocks(console: Console, plan: Plan, *, every_block: bool) -> None:
    """Print what happens to the blocks: as a table, or as lines per class if the screen is too narrow for one."""
    if console.width < NARROW:
        console.print("\n".join((*class_lines(plan.blocks), *legend(plan.blocks))), markup=False)
    else:
        console.print(plan_table(plan.blocks) if every_block else class_table(plan.blocks))


def figures(plan: Plan) -> dict[str, Any]:
    """Return a plan's figures as JSON's own types, in bytes and seconds."""
    names = (
        "budget_bytes", "predicted_peak_bytes", "least_budget_bytes", "host_bytes", "moved_bytes", "predicted_step_s",
        "endless_s", "lower_bound_s", "gap", "status",
    )  # fmt: skip
    return {
        "about": asdict(plan.about),
        **{name: getattr(plan, name) for name in names},
        "stall_s": plan.simulation.stall_s,
        "stored_bytes": plan.stored_bytes,
        "blocks": [asdict(row) for row in plan.blocks],
    }


def _classes(plan: Plan) -> Iterator[str]:
    """Yield every class that has parameters with the module of its largest one.

    Numbers that differ between its blocks become *. Where several classes would have one name, each has the whole path.
    """
    largest: dict[int, tuple[int, str]] = {}
    blocks = block_of_items(plan.schedule)
    for item, size in plan.schedule.item_bytes.items():
        if item.kind is ItemKind.PARAMETER and item in blocks:
            largest[blocks[item]] = max(largest.get(blocks[item], (0, "")), (size, item.name))
    members: dict[str, list[list[str]]] = {}
    for index, row in enumerate(plan.blocks):
        if index in largest:
            members.setdefault(row.class_id, []).append(_module(largest[index][1]))
    paths = {class_id: _common_path(found) for class_id, found in members.items()}
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths.values()))
    start = len(list(alike)) if len(paths) > 1 else 0
    short = {class_id: _to_part_of_layer(path[start:]) for class_id, path in paths.items()}
    times = Counter(short.values())
    for class_id, name in short.items():
        whole = ".".join(paths[class_id][start:])
        yield f"{class_id}={(whole if times[name] > 1 else name) or 'the model'}"


def _module(parameter: str) -> list[str]:
    """Return the path of a parameter's module, without the name that peft gives to what an adapter wraps."""
    return [part for part in parameter.split(".")[:-1] if part != "base_layer"]


def _common_path(paths: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the path of a class's first block, with * for the numbers in which its blocks differ."""
    first, *rest = paths
    alike = [path for path in rest if len(path) == len(first)]
    return tuple(
        "*" if part.isdigit() and any(path[place] != part for path in alike) else part
        for place, part in enumerate(first)
    )


def _to_part_of_layer(path: Sequence[str]) -> str:
    """Return a path up to one name below its last number, which tells the part of a layer: self_attn, mlp."""
    numbers = [place for place, part in enumerate(path) if part == "*" or part.isdigit()]
    return ".".join(path[: numbers[-1] + 2] if numbers else path)


def verdict(plan: Plan) -> Text:
    """Say in a line how much memory of each kind a plan needs; in yellow if that is much RAM and none was named."""
    device, host = format_bytes(plan.predicted_peak_bytes), format_least_bytes(plan.host_bytes)
    named_bytes = plan.problem.host_budget_bytes if plan.problem is not None else plan.schedule.host_budget_bytes
    if named_bytes < _UNLIMITED_BYTES:
        ram, style = f"{host} of RAM, of {format_bytes(named_bytes)}", ""
    elif plan.host_bytes > _USUAL_RAM_BYTES:
        ram, style = f"{host} of RAM (--ram SIZE says how much there is)", "yellow"
    else:
        ram, style = f"{host} of RAM", ""
    return Text.assemble(("fits", "green"), f": {device} of GPU memory and ", (ram, style))


def summary(plan: Plan) -> Iterator[tuple[str, str | Text]]:
    """Yield the most important figures, each as a label and a text."""
    step_s, endless_s = plan.predicted_step_s, plan.endless_s
    into, out = plan.moved_bytes
    peak, budget = format_bytes(plan.predicted_peak_bytes), format_bytes(plan.budget_bytes)
    tokens = plan.about.tokens
    rate = f", {tokens / step_s:,.0f} tokens/s" if tokens else ""
    yield "one step", f"{format_seconds(step_s)} predicted{rate}"
    yield "overhead", _overhead(step_s / endless_s - 1, format_seconds(endless_s))
    least = format_least_bytes(plan.least_budget_bytes)
    yield "GPU memory", f"{peak} at most, budget {budget}; the least budget that works is {least}"
    rest_bytes = plan.schedule.rest_bytes
    short = rest_bytes > plan.schedule.host_budget_bytes
    more = f"; {format_least_bytes(rest_bytes)} when values are read or another plan runs" if short else ""
    yield "RAM", f"{format_least_bytes(plan.host_bytes)} of tensors{more}"
    yield "moved", f"{format_bytes(into)} in and {format_bytes(out)} out per step"
    if plan.order_words:
        yield "order", plan.order_words
    if plan.break_even is not None:
        yield "before the gate", plan.break_even.words()
    if plan.read_bytes:
        yield "storage", plan.read_words
    if any(plan.stored_bytes):
        yield "storage paths", "\n".join([plan.stored_words, *plan.path_words])
    for words in cast_words(plan.schedule):
        yield "casts", words
    yield "bound", f"{plan.bound_words}; {plan.status}"


def _overhead(part: float, endless: str) -> str:
    unlimited = f"unlimited GPU memory ({endless}, updates included)"
    faster = _percent(-part)
    if part < 0 and faster != "0 %":
        return f"{faster.lstrip('+')} faster than with {unlimited}, because the CPU makes some of the updates"
    if part > _TIMES:
        return f"{part + 1:.0f} times as long as with {unlimited}"
    return f"{_percent(part)} over {unlimited}"


def _limit_rows(found: Explanation) -> Iterator[tuple[str, str]]:
    word = "limits"
    for phase in found.phases:
        if phase.seconds <= 0:
            continue
        busy = sorted(phase.busy.items(), key=lambda entry: -entry[1])
        named = [f"{_WORDS.get(name, name)} {round(100 * part)} %" for name, part in busy if part >= _BUSY] or [
            "no resource is busy all the time"
        ]
        name = phase.name.replace("_", "-")
        yield (
            word,
            f"{name} ({format_seconds(phase.seconds)}): {', '.join(named)}; memory {round(100 * phase.memory)} % full",
        )
        word = ""
    if found.launching_matters:
        assert found.launching is not None
        yield "launching", in_usual_units(found.launching.words())
    word = "would save"
    for offer in found.offers:
        less = f"less than {100 * found.certain:.1f} %"
        saved = f"about {format_seconds(offer.saved_s)} per step" if found.worth(offer) else less
        yield word, f"{offer.change}: {saved}"
        word = ""


def _percent(part: float) -> str:
    rounded = round(100 * part, 1)
    return f"{rounded:+.1f} %" if rounded else "0 %"


def curve(points: Sequence[SweepPoint], endless_s: float, width: int) -> Table:
    """Tabulate budget against step time, with bars and, in the caption, the least budget that works."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in ("budget", "one step", "overhead"):
        table.add_column(heading, justify="right", no_wrap=True)
    wide = width >= NARROW
    if wide:
        table.add_column("RAM", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    most_s = max((p.predicted_step_s for p in points if p.predicted_step_s is not None), default=1.0)
    for p in points:
        budget = format_bytes(p.budget_bytes)
        if p.predicted_step_s is None:
            cells = [budget, "-", "-", *(["-"] if wide else []), "too small"]
        else:
            bar = "█" * max(1, round((width - _BESIDE_BAR[wide]) * p.predicted_step_s / most_s))
            host = [format_bytes(p.host_bytes or 0)] if wide else []
            cells = [
                budget,
                format_seconds(p.predicted_step_s),
                _percent(p.predicted_step_s / endless_s - 1),
                *host,
                bar,
            ]
        table.add_row(*cells)
    least = format_least_bytes(points[0].least_budget_bytes)
    table.caption = f"unlimited GPU memory: {format_seconds(endless_s)}; the least budget that works: {least}"
    table.caption_justify = "left"
    return table
