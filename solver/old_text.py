"""Conversion of schedules that earlier versions wrote to the current format."""

from __future__ import annotations

import re
from typing import Any

_LIKE_ROWS = re.compile(r"p:.+\[(?:\d+:\d+|:)\]", re.DOTALL)


def upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """Convert a schedule's dictionary, of any version, to the current version.

    Version 1 differs in two ways. It wrote `accumulate` for the first gradient, which becomes the total on the device.
    And it wrote `s:NAME` for a whole state even if the tensor's name ends like rows; the tensor's compute copy told the
    two apart.
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
    """Return all of the data with the items `odd` in the current form."""
    if isinstance(data, dict):
        return {_renamed(key, odd): _renamed(value, odd) for key, value in data.items()}
    if isinstance(data, list):
        return [_renamed(value, odd) for value in data]
    if isinstance(data, str) and _about(data) in odd:
        return f"{data}[:]"
    return data


def _about(text: str) -> str:
    """Return the item that a text prints, or the one that the printed action is about."""
    parts = text.split(maxsplit=2)
    return parts[2] if len(parts) == 3 and parts[0].isdigit() else text
