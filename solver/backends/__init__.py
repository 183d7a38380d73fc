"""One file per solver; no other module imports solver libraries."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from ...errors import OffmateError

if TYPE_CHECKING:
    from ..answer import RawAnswer
    from ..linear import LinearModel

INSTALL = {"highs": "pip install 'pulp<4' highspy", "cbc": "pip install 'pulp<4'"}


class BackendError(OffmateError):
    """A solver that is unknown or not installed; the message names what to install."""


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
    if name not in INSTALL:
        raise BackendError(f"there is no solver {name!r}; choose one of {', '.join(sorted(INSTALL))}")
    try:
        return import_module(f".{name}", __name__)
    except ImportError as error:
        raise BackendError(f"the solver {name} is not installed ({error}); try: {INSTALL[name]}") from error


def default() -> Backend:
    """Return HiGHS, or CBC where HiGHS is not installed; raises BackendError if neither is installed."""
    try:
        return get("highs")
    except BackendError:
        return get("cbc")
