"""What a solver raises, as errors that say what to try."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import SolverError
from ..solver.backends import BackendError
from ..solver.solve import NoAnswer


@contextlib.contextmanager
def solver_errors() -> Iterator[None]:
    """Raise SolverError for what a solver raises in the body."""
    try:
        yield
    except BackendError as error:
        raise SolverError(f"no plan can be made: {error}") from error
    except NoAnswer as error:
        raise SolverError(
            f"no plan can be made: {error}. The solver ran out of time; give it more with "
            "Config(solver_time_limit_s=...), or plan while nothing else runs"
        ) from error
