"""A model's state in Python, to compare and to restore: attributes, settings, and random states."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..runtime.torch_names.modules import FORWARD_HOOKS
from .python_objects import Found


def random_states() -> dict[str, Any]:
    """Return the states of Python's and numpy's global generators, by the names they have in messages."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy.random"] = sys.modules["numpy"].random.get_state()
    return states


def same_state(one: Any, other: Any) -> bool:
    """Return whether a generator draws the same numbers from both states."""
    return all(map(_same_part, one, other))


def _same_part(one: Any, other: Any) -> bool:
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


@contextlib.contextmanager
def python_restored(model: torch.nn.Module) -> Iterator[None]:
    """Undo what the body does to the model's attributes, settings and hooks, and to Python's and numpy's draws."""
    found = Found(model)
    tables = [(table, dict(table)) for table in (vars(model), *found.tables)]
    tables += [(table, dict(table)) for table in map(vars(model).__getitem__, FORWARD_HOOKS)]
    rows = [(row, list(row)) for row in found.rows if isinstance(row, list)]
    states = random_states()
    try:
        yield
    finally:
        for table, entries in tables:
            if list(map(id, table.values())) != list(map(id, entries.values())) or table.keys() != entries.keys():
                table.clear()
                table.update(entries)
        for row, items in rows:
            row[:] = items
        random.setstate(states["Python's random"])
        if "numpy.random" in states:
            sys.modules["numpy"].random.set_state(states["numpy.random"])
