"""The table of a run of `benchmarks.gpu`, in Markdown: every case with its figures, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .gpu_cases import MODELS, WARM_UP_STEPS, WAYS

Row = dict[str, Any]

_NO_BUDGET = 2**62
_LOSS_AT = WARM_UP_STEPS  # the first step that every case reaches


def gb(n_bytes: int) -> str:
    """Format bytes in the units by which cards are sold."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{n_bytes / 1000:.1f} kB"


def _bytes(name: str) -> Callable[[Row], str]:
    return lambda row: "–" if row.get(name) is None else gb(row[name])


def _seconds(name: str) -> Callable[[Row], str]:
    return lambda row: "–" if row.get(name) is None else f"{row[name]:.3g}"


# Headers and the function that gives a row's cell below each.
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("trained by", lambda row: WAYS[row["way"]].words),
    ("s per step", _seconds("step_s")),
    ("predicted s", _seconds("predicted_step_s")),
    ("launched in, s", _seconds("launch_s")),
    ("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "–"),
    ("device, peak", _bytes("peak_device_bytes")),
    ("predicted peak", _bytes("predicted_peak_bytes")),
    ("host, peak", _bytes("peak_host_bytes")),
    ("pinned", _bytes("pinned_bytes")),
    ("planning, s", _seconds("plan_s")),
    ("loss", lambda row: f"{row['losses'][_LOSS_AT]:.4f}" if len(row.get("losses", ())) > _LOSS_AT else "–"),
    ("note", lambda row: _note(row)),
)


def markdown(result: dict[str, Any]) -> str:
    """Format the measurements as headings and tables.

    Parameters
    ----------
    result: the JSON that `benchmarks.gpu` writes.
    """
    rows = sorted(result["rows"], key=_place)
    parts = [_machine_words(result["machine"])]
    titles = dict.fromkeys(_title(row, result) for row in rows)
    for title in titles:
        parts += [f"**{title}**", _table([row for row in rows if _title(row, result) == title])]
    parts.append(_REMARKS)
    return "\n\n".join(parts)


_REMARKS = (
    "Medians of the steps after the first two. Device: the most bytes that torch's allocator reserved since the "
    "weights were made, planning included. Host: the most bytes resident in the process. Launched in: the host's "
    "seconds to start all that an iteration does. Loss: that of the third step; all train the same weights on the same "
    "batches. Plans of one model share one profile, which the planning time of the first one includes. 1 GB is 10⁹ "
    "bytes."
)


def _place(row: Row) -> tuple[Any, ...]:
    """Return the sort key of a row: models, dtypes, budgets and competitors in a fixed order."""
    budget = _NO_BUDGET if row["budget_bytes"] is None else row["budget_bytes"]
    return list(MODELS).index(row["model"]), row["dtype"], budget, list(WAYS).index(row["way"])


def _title(row: Row, result: dict[str, Any]) -> str:
    batch = result["batches"][row["model"]]
    budget = "the whole card" if row["budget_bytes"] is None else gb(row["budget_bytes"])
    return f"{batch['shape']}, {row['dtype']}, {batch['samples']} × {batch['tokens']} tokens, {budget}"


def _table(rows: list[Row]) -> str:
    """Format rows as a table, without columns in which no row has anything."""
    cells = [(header, [cell(row) for row in rows]) for header, cell in _COLUMNS]
    shown = [(header, column) for header, column in cells if any(text not in ("", "–") for text in column)]
    lines = [[header for header, _ in shown], ["---"] * len(shown), *zip(*(column for _, column in shown))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _note(row: Row) -> str:
    reason = str(row.get("reason", "")).replace("|", "/")
    return reason if row["status"] == "measured" else f"{row['status']}: {reason}"


def _machine_words(machine: dict[str, Any]) -> str:
    card = machine["card"] if machine["card_bytes"] is None else f"{machine['card']} ({gb(machine['card_bytes'])})"
    software = {"driver": machine["driver"], "CUDA": machine["cuda"], "PyTorch": machine["torch"]}
    rates = (f"{way} {gb(machine[f'{way}_bytes_per_s'])}/s" for way in ("in", "out", "both"))
    return (
        f"{card}, {', '.join(f'{name} {version}' for name, version in software.items() if version)}; "
        f"{machine['cpu']}, {machine['cores']} cores, {gb(machine['host_bytes'])} of memory; copies "
        f"{', '.join(rates)}."
    )
