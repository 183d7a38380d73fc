"""Problems and solutions as JSON's own types, so that any instance can be saved, solved again and reported."""

from __future__ import annotations

import functools
import json
import reprlib
import sys
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .items import Item
from .problem import Problem
from .schedule import Action
from .solution import Solution, Status

_FORMATS: dict[type, tuple[str, int]] = {Problem: ("offmate-problem", 1), Solution: ("offmate-solution", 2)}


_PRINTED = (Item, Action)  # stand in files as they print


class FileError(ValueError):
    """A problem or solution that cannot be read: the message names the place and what was expected there."""


def to_dict(record: Problem | Solution) -> dict[str, Any]:
    """Convert a problem or solution to JSON's own types, with its format and version."""
    name, version = _FORMATS[type(record)]
    fields = asdict(record)
    if isinstance(record, Problem):
        fields["rates"] = record.rates.to_dict()
        if record.per_step == 1:
            del fields["per_step"]
        for absent in ("host_in_time", "last_per_step", "speculates", "host_fixed_bytes"):
            if not fields[absent]:
                del fields[absent]
        if record.hands_on:
            del fields["hands_on"]
        for option in (option for block in fields["blocks"] for option in block["options"]):
            if option["launched"] is None:
                del option["launched"]
        for group in fields["groups"]:
            for absent in ("in_files", "cpu_log_s", "has_copies"):
                if not group[absent]:
                    del group[absent]
            if group["in_pieces_on_host"]:
                del group["in_pieces_on_host"]
    else:
        if not record.handed:
            del fields["handed"]
        for flow in fields["groups"].values():
            for absent in ("from_files", "cast"):
                if not flow[absent]:
                    del flow[absent]
    return {"format": name, "version": version} | _plain(fields)


def problem_from_dict(data: dict[str, Any]) -> Problem:
    """Rebuild the problem from a dictionary made by `to_dict`.

    Raises: FileError if the dictionary is of another format or version, damaged, or contradicts itself.
    """
    result = _read(data, Problem)
    assert isinstance(result, Problem)
    return result


def solution_from_dict(data: dict[str, Any]) -> Solution:
    """Rebuild the solution from a dictionary made by `to_dict`.

    Raises: FileError if the dictionary is of another format or version, or damaged.
    """
    result = _read(data, Solution)
    assert isinstance(result, Solution)
    return result


def save(record: Problem | Solution, path: str | Path) -> None:
    """Write a problem or solution to a JSON file."""
    Path(path).write_text(json.dumps(to_dict(record), indent=1) + "\n", encoding="utf-8")


def load_problem(path: str | Path) -> Problem:
    """Read a problem from a JSON file; raises FileError naming the file if it cannot be read."""
    return problem_from_dict(_file(path))


def load_solution(path: str | Path) -> Solution:
    """Read a solution from a JSON file; raises FileError naming the file if it cannot be read."""
    return solution_from_dict(_file(path))


def _file(path: str | Path) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise FileError(f"{path} holds {type(data).__name__}, not an object")
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Status):
        return value.name
    return value


def _read(data: dict[str, Any], kind: type) -> Any:
    expected, version = _FORMATS[kind]
    if data.get("format") != expected or data.get("version") != version:
        found = f"{data.get('format')!r}, version {data.get('version')!r}"
        raise FileError(
            f"not in format {expected!r}, version {version}: found {found}; save it again with this version"
        )
    body = {key: value for key, value in data.items() if key not in ("format", "version")}
    return read_record(body, kind, expected.removeprefix("offmate-"))


def read_record(data: Any, kind: type, place: str) -> Any:
    """Read a dataclass from JSON's own types; raises FileError naming the place of what is wrong."""
    if not isinstance(data, dict):
        raise FileError(f"{place}: expected an object, found {_short(data)}")
    hints = _hints(kind)
    names = {f.name for f in fields(kind)}
    for name in data.keys() - names:
        raise FileError(f"{place}: has an unknown field {_short(name)}")
    # Fields that an older file lacks take their defaults.
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    for name in needed - data.keys():
        raise FileError(f"{place}: lacks {name!r}")
    values = {name: _value(data[name], hints[name], f"{place}.{name}") for name in sorted(names & data.keys())}
    try:
        return kind(**values)
    except ValueError as error:
        raise FileError(f"{place}: {error}") from error


def _value(data: Any, hint: Any, place: str) -> Any:
    """Convert `data` to the type that `hint` describes."""
    if hint in _PRINTED:
        return _printed(data, hint, place)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (tuple, frozenset):
        if not isinstance(data, list):
            raise FileError(f"{place}: expected a list, found {_short(data)}")
        return origin(_value(entry, inner[0], f"{place}[{i}]") for i, entry in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise FileError(f"{place}: expected an object, found {_short(data)}")
        return {_key(key, inner[0], place): _value(v, inner[1], f"{place}[{key!r}]") for key, v in data.items()}
    if origin is UnionType:
        return None if data is None else _value(data, inner[0], place)
    if origin is Literal:
        if data not in inner:
            raise FileError(f"{place}: is {_short(data)}, must be one of {', '.join(map(repr, inner))}")
        return data
    if is_dataclass(hint) and isinstance(hint, type):
        return read_record(data, hint, place)
    if isinstance(hint, type) and issubclass(hint, Enum):
        if not isinstance(data, str) or data not in hint.__members__:
            raise FileError(f"{place}: is {_short(data)}, must be one of {', '.join(hint.__members__)}")
        return hint[data]
    return _scalar(data, hint, place)


def _key(key: str, kind: type, place: str) -> Any:
    if kind in _PRINTED:
        return _printed(key, kind, place)
    try:
        return kind(key)
    except ValueError as error:
        raise FileError(f"{place}: {key!r} is not a valid {kind.__name__}") from error


def _printed(data: Any, kind: Any, place: str) -> Any:
    if not isinstance(data, str):
        raise FileError(f"{place}: expected text, found {_short(data)}")
    try:
        return kind.parse(data)
    except ValueError as error:
        raise FileError(f"{place}: {error}") from None


def _scalar(data: Any, kind: type, place: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        if abs(data) > sys.float_info.max:
            raise FileError(f"{place}: {str(data)[:20]}... is too large a number")
        return float(data)
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise FileError(f"{place}: expected {kind.__name__}, found {_short(data)}")
    if kind is float and data != data:
        raise FileError(f"{place}: is not a number (NaN)")
    return data


def _short(data: Any) -> str:
    """Return what a file holds, cut to a few words: it may be long, or deep."""
    return reprlib.repr(data)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
