"""A plan as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..libraries import load
from ..sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

_SIZES = ("kept", "offloaded", "parameters", "stay", "on CPU")
_LONG_SIZES = ("kept", "offloaded", "parameters", "never leave the GPU", "updated by the CPU")
_OPTIONS = {
    "keep": "all values stay on the GPU",
    "offload": "values leave the GPU and come back",
    "recompute": "only values that cannot be computed again are kept",
    "mixture": "some values stay, some leave, some are recomputed",
}
_COLUMNS = (
    "kept, offloaded: values that a forward leaves for its backward",
    "recomputed: operators (ops) of the forward that run again",
    "stay: never leave the GPU; on CPU: parameters updated by the CPU",
)
_MANY_UNITS = 1000  # above it decimals only widen the table


def plan_table(blocks: Sequence[BlockRow]) -> Table:
    """Return a table with one row for all blocks that are alike, then the totals.

    Parameters
    ----------
    blocks: in the order of the chain.

    Returns: a table that fits 80 columns.
    """
    alike: dict[tuple[str, str, int, tuple[int, ...]], list[int]] = {}
    for index, row in enumerate(blocks):
        alike.setdefault((row.class_id, row.option_word, row.recomputed, _sizes(row)), []).append(index)
    rows = [(spans(indices), *key) for key, indices in alike.items()]
    return _table("per block, and in all", rows, blocks)


def class_table(blocks: Sequence[BlockRow]) -> Table:
    """Return a table with one row for all blocks of a class that run with the same option, added up, then the totals.

    Parameters
    ----------
    blocks: in the order of the chain.

    Returns: a table that fits 80 columns.
    """
    rows = [(f"{n} ×", *rest) for n, *rest in _by_class(blocks)]
    return _table("of all blocks of a class", rows, blocks)


def legend(blocks: Sequence[BlockRow]) -> Iterator[str]:
    """Iterate over lines that explain the names of the options, those that occur."""
    names = {row.option_word for row in blocks}
    for name, words in _OPTIONS.items():
        if name in names:
            yield f"option {name}: {words}"


def class_lines(blocks: Sequence[BlockRow]) -> Iterator[str]:
    """Iterate over the same as lines of text, for screens that are too narrow for a table."""
    for n, class_id, option, recomputed, sizes in _by_class(blocks):
        words = [f"{heading} {format_bytes(size)}" for heading, size in zip(_LONG_SIZES, sizes) if size]
        words += [f"{recomputed} operators run again"] if recomputed else []
        of = f"class {class_id}, {n} × {option}" if words else f"{n} other"
        yield f"{of}: {', '.join(words) or 'nothing to keep or move'}"


def _by_class(blocks: Sequence[BlockRow]) -> Iterator[tuple[int, str, str, int, tuple[int, ...]]]:
    """Iterate over classes and options: number of blocks, and their recomputed operators and bytes, added up.

    The options of a class follow each other. Blocks with nothing to report share the last row.
    """
    order = {class_id: place for place, class_id in enumerate(dict.fromkeys(row.class_id for row in blocks))}
    found: dict[tuple[str, str], list[BlockRow]] = {}
    silent: dict[tuple[str, str], list[BlockRow]] = {}
    for row in blocks:
        if row.recomputed or any(_sizes(row)):
            found.setdefault((row.class_id, row.option_word), []).append(row)
        else:
            silent.setdefault(("other", "-"), []).append(row)
    by_class = sorted(found.items(), key=lambda entry: order[entry[0][0]])
    for (class_id, option), rows in (*by_class, *silent.items()):
        sizes = tuple(sum(column) for column in zip(*map(_sizes, rows)))
        yield len(rows), class_id, option, sum(row.recomputed for row in rows), sizes


def _table(what: str, rows: Sequence[Any], blocks: Sequence[BlockRow]) -> Table:
    totals = [sum(column) for column in zip(*map(_sizes, blocks))]
    unit_bytes, unit = (1 << 20, "MiB") if max(totals) >= 1 << 20 else (1 << 10, "KiB")
    digits = 2 if max(totals) < _MANY_UNITS * unit_bytes else 0

    def cells(sizes: Sequence[int], recomputed: int) -> list[str]:
        texts = [_number(size / unit_bytes, digits) for size in sizes]
        return [*texts[:2], f"{recomputed} op{'s' * (recomputed > 1)}" if recomputed else "-", *texts[2:]]

    table: Table = load("rich.table").Table(
        title=f"Plan: {unit} {what}",
        title_justify="left",
        box=load("rich.box").SIMPLE_HEAD,
        show_footer=True,
        caption="\n".join((*_COLUMNS, *legend(blocks))),
        caption_justify="left",
        show_edge=False,
        padding=0,
    )
    table.add_column("blocks", footer="all", min_width=6)
    table.add_column("class", no_wrap=True, justify="center")
    table.add_column("option", no_wrap=True)
    headings = (*_SIZES[:2], "recomputed", *_SIZES[2:])
    for name, total in zip(headings, cells(totals, sum(row.recomputed for row in blocks))):
        table.add_column(name, footer=total, justify="right", no_wrap=True)
    for first, class_id, option, recomputed, sizes in rows:
        table.add_row(first, class_id, option, *cells(sizes, recomputed))
    return table


def _sizes(row: BlockRow) -> tuple[int, ...]:
    return (
        row.kept_bytes, row.offloaded_bytes, row.params_bytes, row.params_resident_bytes, row.cpu_update_bytes
    )  # fmt: skip


def _number(value: float, digits: int) -> str:
    least = 10.0**-digits
    if 0 < value < least:
        return f"<{least:.{digits}f}"
    return f"{value:.{digits}f}" if value else "-"


def spans(indices: Sequence[int]) -> str:
    """Abbreviate ascending numbers: 3 4 5 as "3–5", 1 3 5 7 9 as "1, 3 … 9"."""
    parts, start = [], 0
    while start < len(indices):
        end = start + 1
        while end + 1 < len(indices) and indices[end + 1] - indices[end] == indices[start + 1] - indices[start]:
            end += 1
        run = indices[start : end + 1]
        if len(run) >= 3 and run[1] - run[0] == 1:
            parts.append(f"{run[0]}–{run[-1]}")
        elif len(run) >= 4:
            parts.append(f"{run[0]}, {run[1]} … {run[-1]}")
        else:
            # A lone pair may be the start of a run that begins at its second member.
            run = run[:1]
            parts.append(str(run[0]))
        start += len(run)
    return ", ".join(parts)


@dataclass(frozen=True)
class BlockRow:
    """One block of a plan's table: what its option keeps, moves and recomputes, and where its parameters live.

    Parameters
    ----------
    kept_bytes, offloaded_bytes: bytes of what its forward makes for its backward.
    recomputed: how many operators its backward runs again.
    params_bytes: bytes of the parameters first used in this block. params_resident_bytes: of these, bytes that never
        leave the device. cpu_update_bytes: of these, bytes that the host updates.
    """

    name: str
    class_id: str
    option: str
    kept_bytes: int
    offloaded_bytes: int
    recomputed: int
    params_bytes: int
    params_resident_bytes: int
    cpu_update_bytes: int

    @property
    def option_word(self) -> str:
        """The option's name without its number, which tells the mixtures of a class apart."""
        return self.option.partition(" ")[0]
