"""JSON and YAML in which every key of an object occurs once: of two values, the libraries would drop one in silence."""

from __future__ import annotations

import json
from typing import Any

import yaml


class RepeatedKey(ValueError):
    """An object has a key twice."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object that the JSON library read. Raises: RepeatedKey, which names the key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedKey(
            f"the key {twice!r} occurs {names.count(twice)} times in one object ({', '.join(names)[:200]}); keep one "
            "of them"
        )
    return found


def read_json(text: str | bytes) -> Any:
    """Return what a JSON text says. Raises: ValueError if it is broken, RepeatedKey if an object has a key twice."""
    return json.loads(text, object_pairs_hook=unique)


class UniqueKeyLoader(yaml.SafeLoader):
    """Reads YAML as `yaml.SafeLoader` does, and raises yaml.YAMLError for a key that a mapping has twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                first = lines[key.value]
                raise yaml.YAMLError(f"the key {key.value!r} stands in line {first} and again in line {line}; keep one")
            lines[key.value] = line
        return super().construct_mapping(node, deep)
