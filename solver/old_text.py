"""Schedules as earlier versions wrote them, in the words of today's."""

from __future__ import annotations

import re
from typing import Any

_LIKE_ROWS = re.compile(r"p:.+\[(?:\d+:\d+|:)\]", re.DOTALL)


def upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """A schedule's dictionary, of any version, as one of today's version.

    Version 1 wrote the first gradient that becomes a total on the device as `accumulate`; and all of a state of a
    tensor whose name ends like rows, which it told from rows by the tensor's compute copy, as `s:NAME`.
    """
    if data["version"] != 1:
        return data
    passes = [*data.get("lead", ()), {"forward": data["forward"], "backward": data["backward"]}]
    begun: set[str] = set()
    passes = [{part: [_sum(line, begun) for line in one[part]] for part in ("forward", "backward")} for one in passes]
    changed = data | passes[-1] | ({"lead": passes[:-1]} if "lead" in data else {})
    odd = {f"s:{item[2:]}" for item in data["item_bytes"] if _LIKE_ROWS.fullmatch(item)}
    return _renamed(changed, odd) if odd else changed


def _sum(line: str, begun: set[str]) -> str:
    parts = line.split(maxsplit=2)
    if len(parts) < 3 or parts[1] != "accumulate" or parts[2] in begun:
        return line
    begun.add(parts[2])
    return f"{parts[0]} begin-total {parts[2]}"


def _renamed(data: Any, odd: set[str]) -> Any:
    """All of the data with the items `odd` in today's words."""
    if isinstance(data, dict):
        return {_renamed(key, odd): _renamed(value, odd) for key, value in data.items()}
    if isinstance(data, list):
        return [_renamed(value, odd) for value in data]
    if isinstance(data, str) and _about(data) in odd:
        return f"{data}[:]"
    return data


def _about(text: str) -> str:
    """The item that a text is, or that the action is about that it prints."""
    parts = text.split(maxsplit=2)
    return parts[2] if len(parts) == 3 and parts[0].isdigit() else text
