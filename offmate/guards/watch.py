"""Tracks the Python state that decides a model's numbers, and whether it has changed.

A graph is captured once. What the Python behind it reads (modes, numbers, flags, configurations, hooks, which modules
there are) is fixed in it. So every call asks a `Watch` which state that Python is in, and each state has its own plans.

A look costs one comparison by identity per attribute. Only if some object was replaced is everything described by
value, so that a number set to the same value is no change, and setting it back finds the earlier state.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from ..runtime.torch_names.autograd import without_torch_function
from .python_objects import ABSENT, Description, Found, attributes_of, difference

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_RECENT = 4

Tables = tuple[dict[Any, Any], ...]


@dataclass(frozen=True)
class _Seen:
    """A snapshot of a model's Python state: containers, and their contents.

    Parameters
    ----------
    holders: objects whose class counts. tables: dictionaries. settings: dictionaries whose `keys`, and their order,
        count. rows: lists, tuples and sets. odd: attributes of objects without a dictionary, by object. own: the
        attributes that the model holds itself. parameters: by canonical name. number: the number of the state.
    """

    holders: tuple[Any, ...]
    classes: tuple[type, ...]
    tables: Tables
    rows: tuple[Any, ...]
    odd: tuple[tuple[Any, str], ...]
    own: dict[str, Any]
    lengths: list[int]
    settings: Tables
    keys: list[Any]
    values: tuple[Any, ...]
    parameters: tuple[tuple[str, torch.nn.Parameter], ...]
    requires: list[bool]
    number: int

    @staticmethod
    def of(model: torch.nn.Module, found: Found, number: int) -> _Seen:
        """Take a snapshot of the model as it is now."""
        tables, rows, odd = tuple(found.tables), tuple(found.rows), tuple(found.odd)
        parameters = tuple(model.named_parameters())
        return _Seen(
            holders=tuple(found.holders),
            classes=tuple(map(type, found.holders)),
            tables=tables,
            rows=rows,
            odd=odd,
            own=attributes_of(model),
            lengths=[*map(len, tables), *map(len, rows)],
            settings=tuple(found.settings),
            keys=[*chain.from_iterable(found.settings)],
            values=tuple(_values(tables, rows, odd)),
            parameters=parameters,
            requires=[*map(_REQUIRES_GRAD, (p for _, p in parameters))],
            number=number,
        )

    def holds(self, model: torch.nn.Module) -> bool:
        """Return whether every object is still the one in the snapshot."""
        own = attributes_of(model)
        return (
            own.keys() == self.own.keys()
            and all(map(operator.is_, own.values(), map(self.own.__getitem__, own)))
            and [*map(len, self.tables), *map(len, self.rows)] == self.lengths
            and [*chain.from_iterable(self.settings)] == self.keys
            and all(map(operator.is_, _values(self.tables, self.rows, self.odd), self.values))
            and all(map(operator.is_, map(type, self.holders), self.classes))
            and [*map(_REQUIRES_GRAD, (p for _, p in self.parameters))] == self.requires
        )


def _values(tables: Tables, rows: tuple[Any, ...], odd: tuple[tuple[Any, str], ...]) -> Iterator[Any]:
    return chain(
        chain.from_iterable(map(dict.values, tables)),
        chain.from_iterable(rows),
        (getattr(it, name, None) for it, name in odd),
    )


class Watch:
    """Numbers the states that a model's Python has been in.

    State: `_states`, every state by its number; `_recent`, how the model looked when it was last in some of them, the
    latest first; `_read`, the attributes that a captured forward has read, None before the first capture; `_free`, the
    attributes that do not count since the forward itself sets them; `_last` and `_before_last`, its last two states.
    Changed on the training thread only.

    Parameters
    ----------
    model: it is not kept alive.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._states: list[Description] = []
        self._recent: list[_Seen] = []
        self._read: set[str] | None = None
        self._free: frozenset[str] = frozenset()
        self._last = self._before_last = 0
        self.look()

    @property
    def parameters(self) -> tuple[tuple[str, torch.nn.Parameter], ...]:
        """The model's parameters by canonical name, as of the last look; empty once the model has been freed."""
        return self._recent[0].parameters if self._model() is not None else ()

    @property
    def trains(self) -> bool:
        """Return whether any parameter required a gradient at the last look."""
        return any(self._recent[0].requires)

    @property
    def changes(self) -> str:
        """A description of what had changed when the model last entered another state."""
        before = self._states[self._before_last]
        return difference(before, self._states[self._last], self._counts)

    def look(self) -> int:
        """Return the number of the state that the model is in now; equal numbers mean equal forwards."""
        number = self._number()
        if number != self._last:
            self._last, self._before_last = number, self._last
        return number

    def _number(self) -> int:
        with without_torch_function():
            model = self._model()
            assert model is not None
            for position, seen in enumerate(self._recent):
                if seen.holds(model):
                    if position:
                        self._recent.insert(0, self._recent.pop(position))
                    return seen.number
            return self._look_closely(model)

    def learn(self, read: frozenset[str], free: frozenset[str]) -> None:
        """Learn from a captured forward: what it reads counts from now on, what it sets itself does not.

        Parameters
        ----------
        read, free: attributes by path.
        """
        self._read = (self._read or set()) | read
        self._free |= free

    def settle(self) -> None:
        """Accept all differences since the last look, since the session itself has made them."""
        model, seen = self._model(), self._recent[0]
        assert model is not None
        self._recent[0] = replace(
            seen,
            own=attributes_of(model),
            lengths=[*map(len, seen.tables), *map(len, seen.rows)],
            keys=[*chain.from_iterable(seen.settings)],
            values=tuple(_values(seen.tables, seen.rows, seen.odd)),
        )

    def _look_closely(self, model: torch.nn.Module) -> int:
        found = Found(model)
        now = found.description
        number = next((n for n, known in enumerate(self._states) if self._alike(known, now)), len(self._states))
        if number == len(self._states):
            self._states.append(now)
        seen = _Seen.of(model, found, number)
        self._recent = [seen, *(s for s in self._recent if s.number != number)][:_RECENT]
        return number

    def _alike(self, one: Description, other: Description) -> bool:
        return all(one.get(path, ABSENT) == other.get(path, ABSENT) for path in {**one, **other} if self._counts(path))

    def _counts(self, path: str) -> bool:
        """Return whether a path can change numbers: an attribute that no captured forward has read cannot."""
        if path in self._free:
            return False
        return self._read is None or not path.startswith(".") or path in self._read
