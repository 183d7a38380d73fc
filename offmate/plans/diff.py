"""The differences between two plans, as sentences and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..libraries import load
from ..reports.units import format_seconds
from ..sizes import format_bytes
from ..solver.items import ItemKind, names_of
from ..solver.schedule import Kind, Schedule
from .table import BlockRow

if TYPE_CHECKING:
    from rich.table import Table

_MANY = 10  # a larger ratio says less than the two numbers beside it
_TINY = 0.001  # of the largest number of both plans: a ratio to less than that says nothing
_RATIO_FROM = 0.0005  # a smaller change is "the same" when it is printed as a percentage


@dataclass(frozen=True)
class Figure:
    """One number of both plans, in bytes or seconds, and the largest number of the same unit in them."""

    name: str
    unit: str
    first: float
    second: float
    largest: float

    @property
    def changed(self) -> bool:
        """Return whether the numbers differ by as much as is worth printing."""
        return abs(self.second - self.first) > _RATIO_FROM * max(abs(self.first), abs(self.second))

    def texts(self) -> tuple[str, str, str]:
        """Return both numbers as readable text, and the change in percent where it says something."""
        write: Callable[[float], str] = format_seconds if self.unit == "s" else lambda size: format_bytes(int(size))
        return write(self.first), write(self.second), self._change()

    def _change(self) -> str:
        if not self.changed:
            return "same"
        tiny = min(self.first, self.second) < _TINY * self.largest
        if tiny or not self.first / _MANY < self.second < self.first * _MANY:
            return ""
        return f"{100 * (self.second / self.first - 1):+.1f} %"


@dataclass(frozen=True)
class Compared:
    """The parts of a plan that are compared: numbers by (name, unit), its schedule, and its table's rows."""

    figures: dict[tuple[str, str], float]
    schedule: Schedule
    blocks: tuple[BlockRow, ...]


@dataclass(frozen=True)
class PlanDiff:
    """Two plans side by side.

    Parameters
    ----------
    figures: budgets, peak, seconds and bytes.
    options: per pair of option names (first plan's, second plan's) the blocks that changed from one to the other; None
        if the plans have different chains.
    places: pairs of a difference in where parameters are kept or updated, and their bytes.
    same_model: whether both plans have the same chain of blocks and the same tensors.
    """

    figures: tuple[Figure, ...]
    options: dict[tuple[str, str], tuple[str, ...]] | None
    places: tuple[tuple[str, int], ...]
    same_model: bool

    def __str__(self) -> str:
        return "\n".join(self.words())

    def words(self) -> list[str]:
        """Return the differences as sentences, the most important first."""
        lines = [] if self.same_model else ["the plans are for different models or shapes: only totals are compared"]
        for figure in self.figures:
            before, after, change = figure.texts()
            if figure.changed:
                lines.append(f"{figure.name}: {before} → {after}{f' ({change})' if change else ''}")
        for (old, new), names in (self.options or {}).items():
            lines.append(f"{len(names)} {'block' if len(names) == 1 else 'blocks'} from {old} to {new}: {_list(names)}")
        lines += [f"{what}: {format_bytes(size)}" for what, size in self.places]
        return lines or ["the plans predict and do the same"]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the numbers of both plans as rows of a table, the headings first."""
        rows = [("", "before", "after", "change")]
        rows += [(figure.name, *figure.texts()) for figure in self.figures]
        for (old, new), names in (self.options or {}).items():
            rows.append((f"blocks {old} → {new}", "", str(len(names)), ""))
        return rows + [(what, "", format_bytes(size), "") for what, size in self.places]

    def table(self) -> Table:
        """Return a table of the numbers of both plans, one row each."""
        headings, *rows = self.rows()
        table: Table = load("rich.table").Table(
            box=load("rich.box").SIMPLE_HEAD,
            show_edge=False,
            title="Two plans",
            title_justify="left",
            padding=(0, 1, 0, 0),
        )
        table.add_column(headings[0], overflow="fold")
        for heading in headings[1:]:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        return table


def diff(first: Compared, second: Compared) -> PlanDiff:
    """Compare two plans, usually of one model with different budgets.

    Returns: the differences from the first to the second.
    """
    largest: dict[str, float] = {}
    for (_, unit), value in (*first.figures.items(), *second.figures.items()):
        largest[unit] = max(largest.get(unit, 0.0), value)
    same = _sizes(first.schedule) == _sizes(second.schedule) and len(first.blocks) == len(second.blocks)
    return PlanDiff(
        figures=tuple(Figure(*key, a, second.figures[key], largest[key[1]]) for key, a in first.figures.items()),
        options=_options(first.blocks, second.blocks) if same else None,
        places=_places(first.schedule, second.schedule) if same else (),
        same_model=same,
    )


def _options(first: tuple[BlockRow, ...], second: tuple[BlockRow, ...]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the blocks whose option changed; options of the same name that keep other bytes count as changed."""
    changed: dict[tuple[str, str], list[str]] = {}
    for old, new in zip(first, second):
        before = (old.option, old.kept_bytes, old.offloaded_bytes, old.recomputed)
        if before != (new.option, new.kept_bytes, new.offloaded_bytes, new.recomputed):
            word = new.option_word
            names = (old.option_word, word if word != old.option_word else f"another {word}")
            changed.setdefault(names, []).append(old.name)
    by_number = sorted(changed.items(), key=lambda entry: -len(entry[1]))
    return {names: tuple(blocks) for names, blocks in by_number}


def _places(first: Schedule, second: Schedule) -> tuple[tuple[str, int], ...]:
    """Return the bytes of parameters whose updater, or whose stay on the device, changed."""
    changed: Counter[str] = Counter()
    sizes = {item.name: size for item, size in first.item_bytes.items() if item.kind is ItemKind.PARAMETER}
    old_moving, new_moving = _moving(first), _moving(second)
    for name, size in sizes.items():
        if _updater(first, name) != (updater := _updater(second, name)):
            changed[f"parameters now updated {updater}"] += size
        if (name in old_moving) != (name in new_moving):
            changed[f"parameters that now {'move' if name in new_moving else 'stay on the GPU'}"] += size
    return tuple(changed.most_common())


def _updater(schedule: Schedule, name: str) -> str:
    if name in schedule.update_cpu_s:
        return "on the CPU"
    return "on the GPU" if name in schedule.update_device_s else "by your own code"


def _moving(schedule: Schedule) -> set[str]:
    """Return the parameters that are copied in at least once per iteration."""
    brought = (action.item for action in schedule.actions if action.kind is Kind.PREFETCH)
    return names_of(brought, ItemKind.PARAMETER)


def _sizes(schedule: Schedule) -> dict[str, int]:
    return {
        item: size for item, size in schedule.item_bytes.items() if item.kind in (ItemKind.PARAMETER, ItemKind.VALUE)
    }


def _list(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown}, …" if len(names) > 8 else shown
