"""Timelines as a Chrome trace: open the file in https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..files import write_whole
from .items import KINDS, describe_action, describe_item
from .timeline import Timeline

# Numbered from 1: viewers treat thread 0 as the idle thread and leave it out. The waits come after the resources.


def save_trace(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Write timelines to one trace file, each as its own process: predicted and measured side by side.

    Parameters
    ----------
    timelines: must have different names. path: the file's path; it is written completely or not at all.
    """
    write_whole(path, json.dumps(trace(timelines), separators=(",", ":")))


def trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the trace as JSON's own types: the Trace Event Format's object form, times in microseconds."""
    events = [event for number, timeline in enumerate(timelines, 1) for event in _events(number, timeline)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _events(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield from _names(process, timeline)
    tracks = {row: number for number, row in enumerate(timeline.rows, 1)}
    for bar in timeline.bars:
        name = describe_item(bar.name)
        arguments: dict[str, Any] = {"what": bar.word, "step": bar.step}
        if bar.block is not None:
            arguments["block"] = bar.block
        if bar.bytes:
            arguments["bytes"] = bar.bytes
        yield _span(process, tracks[bar.row], name, bar.word, bar.start_s, bar.end_s, arguments)
    for wait in timeline.waits:
        before = {"before": describe_action(wait.action), "step": wait.action.step}
        name = f"waits for {timeline.title(wait.cause)}"
        yield _span(process, len(tracks) + 1, name, "wait", wait.start_s, wait.end_s, before)
    yield from _counters(process, timeline)


def _names(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": timeline.name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for track, name in enumerate((*timeline.rows.values(), "waiting"), 1):
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _span(
    process: int, track: int, name: str, category: str, start_s: float, end_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    # Both ends are rounded the same way, so that spans without a gap between them do not overlap.
    start, end = _nanoseconds(start_s), _nanoseconds(end_s)
    return {
        "ph": "X", "pid": process, "tid": track, "name": name, "cat": category, "ts": start / 1000,
        "dur": (end - start) / 1000, "args": arguments,
    }  # fmt: skip


def _counters(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the memory curve, a value per kind; for samples at one nanosecond, the highest and the last."""
    kinds = [(kind, KINDS.index(kind)) for kind in timeline.kinds()]
    moments: dict[int, list[tuple[int, ...]]] = {}
    for sample in timeline.memory:
        moments.setdefault(_nanoseconds(sample.start_s), []).append(sample.bytes)
    shown: tuple[int, ...] | None = None
    for moment, levels in moments.items():
        for level in (max(levels, key=sum), levels[-1]):
            if level != shown:
                values = {kind: level[place] for kind, place in kinds}
                yield {"ph": "C", "pid": process, "name": "device bytes", "ts": moment / 1000, "args": values}
            shown = level


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
