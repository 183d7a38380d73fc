"""Every action of an iteration on screen, by part, with its bytes and those that are on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from ..plans.plan import Plan
from ..plans.table import spans
from ..progress import hidden
from ..reports.items import parts_of
from ..sizes import format_bytes
from ..solver.schedule import ABOUT_ITEMS
from ..solver.simulate import memory_highs
from .screen import pairs

_UNLIMITED_BYTES = 2**60  # a RAM budget beyond this was not named
_SIZE_COLUMNS = 11
_LEAST_NAME_COLUMNS = 12
_SHOWN_LAYERS = 4


def print_actions(console: Console, plan: Plan) -> None:
    """Print what stays on the device, then a line per action: step, action, its bytes, and bytes on the device.

    Longer names are folded to the width of the screen; sizes stand at the right, in binary units.
    """
    schedule = plan.schedule
    of = f" of {format_bytes(schedule.host_budget_bytes)}" if schedule.host_budget_bytes < _UNLIMITED_BYTES else ""
    rows = [
        ("GPU memory", f"{format_bytes(plan.predicted_peak_bytes)} of {format_bytes(plan.budget_bytes)}"),
        ("RAM", f"{format_bytes(schedule.host_layout.used_bytes)}{of}"),
    ]
    for tier, used in schedule.tiers[1:]:
        rows.append((tier.name, f"{format_bytes(used)} of {format_bytes(tier.capacity_bytes)}"))
    rows += _labelled("options", list(_options(plan)))
    residents = list(_residents(plan)) or ["nothing is on the GPU from one iteration to the next"]
    rows += _labelled("stays", residents)
    console.print(pairs(rows))
    with hidden():  # once for all lines
        _print_parts(console, plan)


def _labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    return [(label if number == 0 else "", line) for number, line in enumerate(lines)]


def _print_parts(console: Console, plan: Plan) -> None:
    sizes, highs = plan.schedule.item_bytes, iter(memory_highs(plan.schedule))
    for title, actions in parts_of(plan.schedule):
        console.print()
        _print_line(console, f"{title}:", "moved", "on GPU", indent="", style="bold")
        for action in actions:
            size = sizes[action.item] if action.kind in ABOUT_ITEMS else 0
            held = format_bytes(next(highs) + plan.fixed_bytes)
            _print_line(console, str(action), format_bytes(size) if size else "", held)


def _print_line(console: Console, name: str, moved: str, held: str, indent: str = "  ", style: str = "") -> None:
    """Print a name and two sizes; a name that is too long begins on lines of its own."""
    columns = max(_LEAST_NAME_COLUMNS, console.width - 2 * _SIZE_COLUMNS - len(indent))
    while len(name) > columns:
        console.print(f"{indent}{name[:columns]}", markup=False, style=style)
        name = name[columns:]
    line = f"{indent}{name:<{columns}}{moved:>{_SIZE_COLUMNS}}{held:>{_SIZE_COLUMNS}}"
    console.print(line, markup=False, style=style)


def _options(plan: Plan) -> Iterator[str]:
    """Yield a line per option: its name, and the blocks that run with it."""
    found: dict[str, list[int]] = {}
    for index, row in enumerate(plan.blocks):
        found.setdefault(row.option, []).append(index)
    for name, indices in found.items():
        yield f"{name}: {'block' if len(indices) == 1 else 'blocks'} {spans(indices)}"


def _residents(plan: Plan) -> Iterator[str]:
    """Yield a line per kind of what stays on the device, with the largest; layers that are alike count as one."""
    kinds: dict[str, dict[str, list[int]]] = {}
    for item in plan.schedule.resident:
        layer = ".".join("*" if part.isdigit() else part for part in item.name.split("."))
        kinds.setdefault(item.kind.bytes_kind, {}).setdefault(layer, []).append(plan.schedule.item_bytes[item])
    for kind, layers in kinds.items():
        largest = sorted(layers.items(), key=lambda entry: -sum(entry[1]))
        shown = [
            f"{layer} {format_bytes(sum(sizes))}{f' ({len(sizes)} ×)' if len(sizes) > 1 else ''}"
            for layer, sizes in largest[:_SHOWN_LAYERS]
        ]
        more = [f"{len(largest) - _SHOWN_LAYERS} more"] if len(largest) > _SHOWN_LAYERS else []
        total = format_bytes(sum(map(sum, layers.values())))
        yield f"{kind} {total}: {', '.join([*shown, *more])}"
