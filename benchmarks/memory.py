"""The figure in the README: bytes on the device during one step of the demo, for plain PyTorch and for offmate.

`python -m benchmarks.memory [FILE]` runs the demo's steps and draws the counted bytes (default: docs/memory.svg).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from offmate.runtime.ledger import Ledger
from torch.profiler import ProfilerActivity, profile

import offmate
from offmate.cli.demo import BUDGET_PERCENT, demo_batches, demo_model, demo_optimizer, reference_peak_bytes, train_step
from offmate.sizes import format_bytes

MIB = 1 << 20
STEPS = 4

WIDTH, HEIGHT = 760, 330
LEFT, TOP, RIGHT, BOTTOM = 62, 46, 30, 44
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 } .back { fill: #ffffff } .grid { stroke: #d8dee4 } .soft { fill: #59636e }
  .plain { fill: #bc4c00; fill-opacity: 0.15; stroke: #bc4c00 }
  .ours { fill: #0969da; fill-opacity: 0.45; stroke: #0969da }
  .plain-text { fill: #bc4c00 } .ours-text { fill: #0969da }
  .budget { stroke: #1f2328; stroke-dasharray: 6 4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .back { fill: #0d1117 } .grid { stroke: #30363d } .soft { fill: #9198a1 }
    .plain { fill: #f0883e; stroke: #f0883e } .ours { fill: #58a6ff; stroke: #58a6ff }
    .plain-text { fill: #f0883e } .ours-text { fill: #58a6ff } .budget { stroke: #e6edf3 }
  }
"""


@dataclass(frozen=True)
class Curve:
    """Bytes on the device over one step: (seconds since its start, bytes) at every change, and the step's seconds."""

    points: tuple[tuple[float, int], ...]
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """The highest point."""
        return max(size for _, size in self.points)


def plain_curve() -> Curve:
    """Return the fastest of a few steps of plain PyTorch, from the allocator's reports."""
    model = demo_model()
    optimizer = demo_optimizer(model)
    first, *batches = demo_batches(1 + STEPS)
    train_step(model, optimizer, first)
    states = [t for state in optimizer.state.values() for t in state.values()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in [*model.parameters(), *states]}
    curves = []
    for batch in batches:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
            start_ns = time.time_ns()
            train_step(model, optimizer, batch)
            seconds = (time.time_ns() - start_ns) / 1e9
        level, points = sum(storages.values()), []
        events = log.profiler.kineto_results.events()  # type: ignore[union-attr]
        for at_ns, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
            level += change
            points.append(((at_ns - start_ns) / 1e9, level))
        curves.append(Curve(tuple(points), seconds))
    return min(curves, key=lambda curve: curve.seconds)


def our_curve(budget_bytes: int) -> Curve:
    """Return the fastest of a few steps of offmate inside the budget, from the device's ledger."""
    model = demo_model()
    optimizer = demo_optimizer(model)
    first, *batches = demo_batches(1 + STEPS)
    model = offmate.compile(model, budget_bytes, optimizer=optimizer, device="emulated")
    train_step(model, optimizer, first)
    curves = []
    for batch in batches:
        with _ledger_points() as points:
            start_s = time.perf_counter()
            train_step(model, optimizer, batch)
            seconds = time.perf_counter() - start_s
        curves.append(Curve(tuple((at - start_s, size) for at, size in points), seconds))
    return min(curves, key=lambda curve: curve.seconds)


@contextmanager
def _ledger_points() -> Iterator[list[tuple[float, int]]]:
    points: list[tuple[float, int]] = []
    made, freed = Ledger.made, Ledger.freed

    def note_made(self: Ledger, amount_bytes: int, workspace_bytes: int = 0) -> None:
        made(self, amount_bytes, workspace_bytes)
        points.append((time.perf_counter(), self.level_bytes + workspace_bytes))
        points.append((points[-1][0], self.level_bytes))

    def note_freed(self: Ledger, amount_bytes: int) -> None:
        freed(self, amount_bytes)
        points.append((time.perf_counter(), self.level_bytes))

    with patch.object(Ledger, "made", note_made), patch.object(Ledger, "freed", note_freed):
        yield points


def draw(plain: Curve, ours: Curve, budget_bytes: int) -> str:
    """Draw the figure as SVG text, legible on light and dark pages."""
    top = -(-plain.peak_bytes // (100 * MIB)) * 100 * MIB

    def x(share: float) -> float:
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(size: float) -> float:
        return HEIGHT - BOTTOM - size / top * (HEIGHT - TOP - BOTTOM)

    def text(name: str, at_x: float, at_y: float, words: str, anchor: str = "middle") -> str:
        return f'<text class="{name}" x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}">{words}</text>'

    def level(name: str, size: int) -> str:
        return f'<line class="{name}" x1="{x(0)}" x2="{x(1)}" y1="{y(size):.1f}" y2="{y(size):.1f}"/>'

    parts = [f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="8"/>']
    parts.append(text("title", LEFT, 26, "Device memory during one training step of the demo", "start"))
    for size in range(0, top + 1, 100 * MIB):
        parts += [level("grid", size), text("soft", LEFT - 8, y(size) + 4, str(size // MIB), "end")]
    parts.append(text("soft", LEFT - 8, TOP - 14, "MiB", "end"))
    for percent in range(0, 101, 20):
        parts.append(text("soft", x(percent / 100), HEIGHT - 24, f"{percent} %"))
    parts.append(text("soft", x(0.5), HEIGHT - 6, "share of the step: forward, backward, update"))
    for name, curve in (("plain", plain), ("ours", ours)):
        parts.append(f'<path class="{name}" d="{_outline(curve, x, y)}"/>')
    ours_peak = f"offmate: {format_bytes(ours.peak_bytes)} at most, the same losses and parameters"
    parts += [
        level("budget", budget_bytes),
        text("plain-text", x(0.5), y(plain.peak_bytes / 2), f"plain PyTorch: {format_bytes(plain.peak_bytes)} at most"),
        text("", x(1) - 6, y(budget_bytes) - 7, f"budget {format_bytes(budget_bytes)}", "end"),
        text("ours-text", x(0.5), y(budget_bytes) - 7, ours_peak),
    ]
    body = "\n".join(parts)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def _outline(curve: Curve, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Return a closed path under the curve: the highest point of every pixel, so that no peak is lost."""
    highest: dict[int, int] = {}
    level = curve.points[0][1]
    changes = [(x(at_s / curve.seconds), size) for at_s, size in curve.points]
    for pixel in range(round(x(0)), round(x(1)) + 1):
        highest[pixel] = level
        while changes and changes[0][0] <= pixel:
            level = changes.pop(0)[1]
            highest[pixel] = max(highest[pixel], level)
    corners = [f"{pixel} {y(size):.1f}" for pixel, size in highest.items()]
    return f"M{round(x(0))} {y(0):.1f} L" + " L".join(corners) + f" L{round(x(1))} {y(0):.1f} Z"


def main() -> None:
    """Measure and draw."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/memory.svg")
    torch.manual_seed(0)
    budget_bytes = reference_peak_bytes("emulated") * BUDGET_PERCENT // 100 // MIB * MIB
    picture = draw(plain_curve(), our_curve(budget_bytes), budget_bytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(picture)
    print(f"{target} written")


if __name__ == "__main__":
    main()
