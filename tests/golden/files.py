"""The golden files: where they lie, what they are for, and what is different from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_PROBLEMS = _HERE / "problems.json"
_LIBRARIES = ("torch", "transformers", "peft", "highspy", "ortools")
_DIGITS = 9  # the solver's own tolerance is far above
_SHOWN = 5


def versions() -> dict[str, str]:
    """The libraries that decide what is captured and which of several best points a search ends at."""
    return {name: version(name).split("+")[0] for name in _LIBRARIES}


def written_with() -> dict[str, str]:
    """The libraries with which the golden files were written."""
    found: dict[str, str] = json.loads(_PROBLEMS.read_text())["versions"]
    return found


def problems() -> dict[int, dict[str, str]]:
    """The expected hashes by seed."""
    return {int(seed): hashes for seed, hashes in json.loads(_PROBLEMS.read_text())["problems"].items()}


def write(hashes: dict[int, dict[str, str]], plans: dict[str, Any]) -> None:
    """Make what was found what is expected; plan files that are not among `plans` stay."""
    data = {"versions": versions(), "problems": {str(seed): found for seed, found in hashes.items()}}
    _PROBLEMS.write_text(json.dumps(data, indent=0) + "\n")
    for name, plan in plans.items():
        _path(name).write_text(json.dumps(plan, indent=0) + "\n")


def changed(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Which of a problem's hashes are not as they were."""
    return [what for what in expected if found.get(what) != expected[what]]


def differences(name: str, plan: Any) -> list[str]:
    """The first places at which a plan file is not as it was; numbers count to nine digits."""
    found = _differences("", json.loads(_path(name).read_text()), json.loads(json.dumps(plan)))
    return [line for line, _ in zip(found, range(_SHOWN))]


def _path(name: str) -> Path:
    return _HERE / "plans" / f"{name.replace(',', '').replace(' ', '-')}.json"


def _differences(where: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(f"{where}.{key}", old.get(key), new.get(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, pair in enumerate(zip(old, new)):
            yield from _differences(f"{where}[{i}]", *pair)
    elif _plain(old) != _plain(new):
        yield f"{where} was {str(old)[:80]}, is {str(new)[:80]}"


def _plain(value: Any) -> Any:
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else value
