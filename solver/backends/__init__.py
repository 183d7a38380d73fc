"""One file per solver; no other module imports solver libraries."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from ...errors import OffmateError
from ...libraries import broken, explained

if TYPE_CHECKING:
    from ..answer import RawAnswer
    from ..linear import LinearModel

LIBRARY = {"highs": "highspy", "cbc": "pulp"}

log = logging.getLogger("offmate")


class BackendError(OffmateError):
    """A solver that is unknown, not installed or does not load; the message names what to install."""


class Backend(Protocol):
    """A solver that minimises linear models."""

    def solve(
        self,
        model: LinearModel,
        time_limit_s: float,
        gap: float,
        start: Sequence[float] = (),
        *,
        nodes: int | None = None,
        vertex: bool = True,
    ) -> RawAnswer:
        """Return the best point found in `time_limit_s` seconds, or the first within the relative `gap` of the bound.

        `start` is a feasible point to begin with, or empty; `nodes` limits the nodes of the search tree. If `vertex` is
        False, any optimal point of a relaxation will do.
        """
        ...


def get(name: str) -> Backend:
    """Return the backend called `name`: "highs" or "cbc"; raises BackendError naming what to install."""
    if name not in LIBRARY:
        raise BackendError(f"there is no solver {name!r}; choose one of {', '.join(sorted(LIBRARY))}")
    try:
        return import_module(f".{name}", __name__)
    except (ImportError, OSError) as error:
        raise BackendError(explained(error) or broken(LIBRARY[name], error)) from error


def default() -> Backend:
    """Return HiGHS, or CBC where HiGHS does not load; raises BackendError if neither does."""
    try:
        return get("highs")
    except BackendError as error:
        without = str(error)
    try:
        found = get("cbc")
    except BackendError as error:
        raise BackendError(f"there is no solver: {without}. And {error}") from error
    _say_once(f"{without}. Until then CBC solves, which can take ten times as long")
    return found


@cache
def _say_once(words: str) -> None:
    log.warning("%s", words)
